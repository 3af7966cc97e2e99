#include "engine/launch/processes/executor.h"

#include <fmt/format.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <nlohmann/json.hpp>
#include <optional>
#include <vector>

#include "comm/rendezvous/board_mirror.h"
#include "comm/rendezvous/connect.h"
#include "comm/rendezvous/endpoint.h"
#include "comm/rendezvous/store_protocol.h"
#include "comm/world/same_build.h"
#include "core/system/console_input.h"
#include "engine/launch/processes/executor_channel.h"
#include "engine/launch/processes/local_processes.h"
#include "tandem/error.h"

namespace tandem {
namespace {

using control::Connection;
using Json = nlohmann::ordered_json;

constexpr int kServeMs = 50;
constexpr double kAddressSeconds = 2;
/// Share of the time after which the launcher declares a silent host lost: its ranks end before.
constexpr double kSilentShare = 0.8;

/// First of the launcher's addresses that accepts a connection; else the first.
std::string reachable_address(const Json& settings) {
  const std::vector<std::string> addresses = settings.at("addresses");
  std::string why;
  for (const std::string& address : addresses) {
    const control::Endpoint endpoint{"", address, settings.at("port")};
    if (control::connect_to(endpoint, kAddressSeconds, why).open()) return address;
  }
  return addresses.at(0);
}

std::vector<std::string> command_of(const Json& settings) {
  std::vector<std::string> command;
  for (const Json& word : settings.at("command")) {
    command.push_back(bytes_of_text(word.get<std::string>()));
  }
  return command;
}

class Executor {
 public:
  explicit Executor(const Json& settings)
      : slots_(settings.at("slots")),
        host_(settings.at("host")),
        max_silence_s_(kSilentShare * settings.at("host_timeout_s").get<double>()),
        secret_(settings.at("secret")),
        address_(reachable_address(settings)) {
    sigset_t watched, before;
    sigemptyset(&watched);
    sigaddset(&watched, SIGCHLD);
    sigprocmask(SIG_BLOCK, &watched, &before);
    signals_ = Connection(signalfd(-1, &watched, SFD_CLOEXEC | SFD_NONBLOCK));
    processes_.emplace(slots_, command_of(settings), before, memory_.fd(),
                       [this](int slot, int stream, const std::string& line) {
                         channel_.send(Report::output, slot, uint64_t(stream), line);
                       });
    if (settings.at("board")) {
      board_.emplace(slots_, settings.at("run_id").get<std::string>());
      processes_->use_board(*board_, settings.at("step_timeout_s"));
    }
    connect(settings);
  }

  void run() {
    while (serve()) {
    }
  }

 private:
  struct Slot {
    bool runs = false, has_output = false, hangs = false;
  };

  void connect(const Json& settings) {
    Launch launch;
    launch.rank = host_;
    launch.size = settings.at("hosts");
    launch.host = address_;
    launch.port = settings.at("port");
    channel_ =
        ExecutorChannel(control::join(launch, executor_credentials(secret_, settings.at("run_id")),
                                      settings.at("start_timeout_s")));
    channel_.send(Report::build, 0, this_build().allowed, this_build().text);
  }

  bool serve() {
    std::vector<pollfd> waiting{{signals_.fd(), POLLIN, 0}, {channel_.fd(), channel_.events(), 0}};
    const bool accepts_output = !channel_.queued();
    if (accepts_output) processes_->add_descriptors(waiting);
    poll(waiting.data(), waiting.size(), kServeMs);
    signalfd_siginfo signal{};
    while (read(signals_.fd(), &signal, sizeof signal) == ssize_t(sizeof signal)) {
    }
    const bool serves =
        channel_.serve([this](uint64_t word, int slot, uint64_t value, std::string_view text) {
          obey(Order(word), slot, value, text);
        });
    if (!serves) return false;
    if (channel_.silence().count() > max_silence_s_) {
      throw Error(
          fmt::format("launch: no sign of life of the launcher for {:.3g} s: its ranks on "
                      "this host end",
                      max_silence_s_));
    }
    if (accepts_output) processes_->serve(std::span(waiting).subspan(2));
    report();
    return true;
  }

  void obey(Order order, int slot, uint64_t value, std::string_view text) {
    switch (order) {
      case Order::start:
        return start(slot, text);
      case Order::signal:
        return processes_->send_signal(slot, int(value));
      case Order::decisions:
        if (board_ && !text.empty()) {
          control::apply_decisions(*board_, host_, control::bytes_of(text));
        }
        return;
    }
  }

  void start(int slot, std::string_view text) {
    Variables variables = Json::parse(text).get<Variables>();
    variables.emplace_back("MASTER_ADDR", address_);
    variables.emplace_back("TANDEM_SECRET", secret_);
    variables.emplace_back("TANDEM_SECRET_FILE", "");
    if (board_) board_->reset_slot(slot, board_->slot(slot).rank);
    try {
      processes_->start(slot, variables);
    } catch (const Error& error) {
      return channel_.send(Report::failed, slot, 0, error.what());
    }
    state_[size_t(slot)] = {true, true, false};
    channel_.send(Report::started, slot, uint64_t(processes_->pid(slot)), "");
  }

  void report() {
    const auto now = control::Clock::now();
    std::vector<int> running;
    for (int slot = 0; slot < slots_; ++slot) {
      if (state_[size_t(slot)].runs) running.push_back(slot);
    }
    if (board_ && !running.empty()) {
      send_progress(running);
    } else if (channel_.is_due(now)) {
      channel_.send(Report::progress, 0, 0, "");
    }
    for (int slot = 0; slot < slots_; ++slot) {
      Slot& state = state_[size_t(slot)];
      if (const auto end = processes_->take_end(slot)) {
        processes_->drain(slot);
        if (board_) send_progress({&slot, 1});  // its last words
        channel_.send(Report::ended, slot, uint64_t(end->status), end->cause);
        state.runs = false;
      }
      if (state.has_output && !processes_->has_output(slot)) {
        state.has_output = false;
        channel_.send(Report::closed, slot, 0, "");
      }
      if (!board_ || !state.runs || state.hangs || board_->slot(slot).rank < 0) continue;
      const std::string cause = processes_->find_hang(slot);
      if (cause.empty()) continue;
      state.hangs = true;
      channel_.send(Report::hung, slot, 0, cause);
    }
  }

  void send_progress(std::span<const int> slots) {
    const auto bytes = control::read_progress(*board_, slots);
    channel_.send(Report::progress, 0, 0, control::text_of(bytes));
  }

  const int slots_, host_;
  const double max_silence_s_;
  const std::string secret_;
  const std::string address_;  ///< of the launcher
  std::vector<Slot> state_{size_t(slots_)};
  Connection signals_;
  ExecutorChannel channel_;
  std::optional<control::Board> board_;
  const Connection memory_ = make_snapshot_memory();
  std::optional<LocalProcesses> processes_;  ///< last: its output goes to the channel
};

}  // namespace

bool is_forwarded(const std::string& variable) {
  for (const char* all : {"PATH", "LD_LIBRARY_PATH", "PYTHONPATH"}) {
    if (variable == all) return true;
  }
  if (variable.starts_with("TANDEM_SECRET") || variable.starts_with("TANDEM_MEMBERSHIP") ||
      variable.starts_with("TANDEM_SNAPSHOT")) {
    return false;
  }
  for (const char* begin : {"TANDEM_", "OMP_", "NCCL_", "CUDA_"}) {
    if (variable.starts_with(begin)) return true;
  }
  return false;
}

void run_executor() {
  constexpr size_t kMaxMib = 16;
  Json settings;
  try {
    settings = Json::parse(read_input("launch --executor", kMaxMib));
    for (const auto& [name, value] : settings.at("environment").get<Variables>()) {
      setenv(bytes_of_text(name).c_str(), bytes_of_text(value).c_str(), 1);
    }
    const std::string directory = bytes_of_text(settings.at("directory").get<std::string>());
    if (chdir(directory.c_str()) != 0) {
      throw InvalidArgument(fmt::format("{}: {}: expected the launcher's folder on this host, too",
                                        directory, std::strerror(errno)));
    }
    Executor(settings).run();
  } catch (const Json::exception&) {
    throw InvalidArgument(
        "launch --executor: standard input: expected settings, as tandem launch --hosts sends "
        "them");
  }
}

}  // namespace tandem
