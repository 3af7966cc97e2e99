#include "engine/launch/processes/remote_processes.h"

#include <fmt/format.h>
#include <sys/mman.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <thread>
#include <utility>

#include "comm/rendezvous/addresses.h"
#include "comm/rendezvous/board_mirror.h"
#include "comm/rendezvous/endpoint.h"
#include "comm/rendezvous/store_protocol.h"
#include "comm/world/same_build.h"
#include "core/system/console.h"
#include "core/system/files.h"
#include "core/system/lines.h"
#include "core/system/machine.h"
#include "core/system/printable.h"
#include "core/system/process/file_limit.h"
#include "engine/launch/processes/executor.h"
#include "tandem/error.h"

namespace tandem {
namespace {

using control::Connection;

constexpr int kConnectMs = 100;
constexpr size_t kDescriptorsOfHost = 3;
/// For executors to end after the launch.
constexpr auto kEndTime = std::chrono::seconds(5);
constexpr auto kEndPause = std::chrono::milliseconds(5);

Variables forwarded_environment() {
  Variables variables;
  for (char** entry = environ; entry && *entry; ++entry) {
    const std::string line(*entry);
    const size_t equals = line.find('=');
    if (equals == line.npos || !is_forwarded(line.substr(0, equals))) continue;
    variables.emplace_back(text_of_bytes(line.substr(0, equals)),
                           text_of_bytes(line.substr(equals + 1)));
  }
  return variables;
}

/// The word as a shell reads it.
std::string quoted(const std::string& word) {
  std::string text = "'";
  for (const char c : word) c == '\'' ? text += "'\\''" : text += c;
  return text + "'";
}

/// File without a name that holds `text`, to be read from its begin.
Connection file_of(const std::string& text) {
  Connection file(memfd_create("tandem-executor", MFD_CLOEXEC));
  size_t written = 0;
  while (file.open() && written < text.size()) {
    const ssize_t wrote = write(file.fd(), text.data() + written, text.size() - written);
    if (wrote < 0) break;
    written += size_t(wrote);
  }
  if (written < text.size() || lseek(file.fd(), 0, SEEK_SET) != 0) {
    throw IoError(
        fmt::format("launch: memory for the executors' settings: {}", describe_errno(errno)));
  }
  return file;
}

}  // namespace

RemoteProcesses::RemoteProcesses(const LaunchRequest& request, const std::string& run_id,
                                 const std::string& secret, const sigset_t& mask,
                                 LocalProcesses::Print print)
    : request_(request),
      run_id_(run_id),
      secret_(secret),
      print_(std::move(print)),
      slots_(size_t(request.ranks + request.spares)) {
  const auto hosts = parse_hosts(read_small_file(request.hosts), request.hosts);
  const auto of_slots = assign_hosts(hosts, request.ranks, request.spares);
  for (size_t slot = 0; slot < slots_.size(); ++slot) slots_[slot].host = of_slots[slot];
  for (const LaunchHost& host : hosts) hosts_.emplace_back().name = host.name;
  Connection listener = control::listen_on({"", host_name(), request.port, "--port"});
  port_ = control::port_of(listener);
  const auto credentials = executor_credentials(secret_, run_id_);
  admission_.emplace(std::move(listener), credentials, int(hosts_.size()));
  for (size_t host = 0; host < hosts_.size(); ++host) start_shell(host, mask);
}

RemoteProcesses::~RemoteProcesses() {
  for (Host& host : hosts_) host.channel.close();
  const auto until = control::Clock::now() + kEndTime;
  for (Host& host : hosts_) {
    int status = 0;
    if (!host.ready) host.shell.send_signal(SIGTERM);
    while (host.shell.running() && !host.shell.has_ended(status) && control::Clock::now() < until) {
      std::this_thread::sleep_for(kEndPause);
    }
    host.shell.send_signal(SIGKILL);
    host.shell.wait_for_end();
  }
}

std::string RemoteProcesses::settings_of(size_t host) const {
  std::vector<std::string> command;
  for (const std::string& word : request_.command) command.push_back(text_of_bytes(word));
  return nlohmann::json{{"host", host},
                        {"hosts", hosts_.size()},
                        {"slots", slots_.size()},
                        {"addresses", control::local_addresses()},
                        {"port", port_},
                        {"secret", secret_},
                        {"run_id", run_id_},
                        {"directory", text_of_bytes(std::filesystem::current_path().string())},
                        {"environment", forwarded_environment()},
                        {"command", command},
                        {"board", request_.replaces()},
                        {"step_timeout_s", request_.step_timeout_s},
                        {"start_timeout_s", request_.start_timeout_s},
                        {"host_timeout_s", request_.host_timeout_s}}
      .dump();
}

void RemoteProcesses::start_shell(size_t host, const sigset_t& mask) {
  std::vector<std::string> command = words_of(request_.remote_shell);
  if (command.empty()) {
    throw InvalidArgument("launch --remote-shell: expected a command, as: ssh -o BatchMode=yes");
  }
  const std::string program = std::filesystem::read_symlink("/proc/self/exe").string();
  command.push_back(hosts_[host].name);
  command.push_back(fmt::format("exec {} launch --executor", quoted(program)));
  const Connection input = file_of(settings_of(host));
  hosts_[host].shell.start(command, {}, {}, mask, input.fd());
}

void RemoteProcesses::connect(int signals) {
  const auto until = control::after(request_.start_timeout_s);
  const auto is_ready = [](const Host& host) { return host.ready; };
  bool asks_to_save = false;
  while (!std::ranges::all_of(hosts_, is_ready)) {
    std::vector<pollfd> waiting{{admission_->fd(), POLLIN, 0}, {signals, POLLIN, 0}};
    add_descriptors(waiting);
    poll(waiting.data(), waiting.size(), kConnectMs);
    admit();
    serve(std::span(waiting).subspan(2));
    signalfd_siginfo signal{};
    while (read(signals, &signal, sizeof signal) == ssize_t(sizeof signal)) {
      const int number = int(signal.ssi_signo);
      if (number == SIGINT || number == SIGTERM || number == SIGHUP) throw Ended{128 + number};
      asks_to_save = asks_to_save || number == SIGUSR1 || number == SIGUSR2;
    }
    for (Host& host : hosts_) {
      check_shell(host);
      if (host.ready || control::Clock::now() < until) continue;
      throw Error(fmt::format(
          "launch: host {}: its executor has not connected to port {} of this host within "
          "{:.3g} s{}{}",
          host.name, port_, request_.start_timeout_s, host.last_line.empty() ? "" : ": ",
          host.last_line));
    }
  }
  admission_.reset();
  if (asks_to_save) raise(SIGUSR1);  // once more, for the ranks
}

void RemoteProcesses::admit() {
  const auto check = [&](int host, int size) {
    if (size != int(hosts_.size()) || host < 0 || host >= size) return control::Verdict::other_size;
    return hosts_[size_t(host)].channel.open() ? control::Verdict::taken
                                               : control::Verdict::admitted;
  };
  for (auto& [connection, host] : admission_->serve(check)) {
    hosts_[size_t(host)].channel = ExecutorChannel(std::move(connection));
  }
}

/// Fails if the remote shell has ended before its executor was ready.
void RemoteProcesses::check_shell(Host& host) {
  int status = 0;
  if (host.ready || !host.shell.has_ended(status)) return;
  pollfd errors{host.shell.output(1), POLLIN, 0};
  while (errors.fd >= 0 && poll(&errors, 1, 0) > 0) {
    pass_on(host, 1);
    errors.fd = host.shell.output(1);
  }
  throw Error(fmt::format("launch: host {}: its executor {} before it was ready{}{}", host.name,
                          describe_end(status), host.last_line.empty() ? "" : ": ",
                          host.last_line));
}

void RemoteProcesses::pass_on(Host& host, int stream) {
  host.shell.pass_on(stream, [&](int, const std::string& line) {
    if (host.ready) return print_line(1, fmt::format("[{}] {}", host.name, line));
    const std::string text = line.substr(0, line.find_last_not_of("\r\n") + 1);
    if (!text.empty()) host.last_line = text;
  });
}

void RemoteProcesses::use_board(control::Board& board, double) {
  board_ = &board;
  for (size_t slot = 0; slot < slots_.size(); ++slot) {
    board.slot(int(slot)).host = slots_[slot].host;
  }
}

void RemoteProcesses::start(int slot, const Variables& variables) {
  Slot& state = slots_[size_t(slot)];
  Host& host = hosts_[size_t(state.host)];
  state = {state.host, 0, true, true, {}, "", state.starts + 1};
  if (host.lost) {  // since it was chosen
    state.end = ProcessEnd{SIGKILL, fmt::format("was not started on the lost host {}", host.name)};
    return;
  }
  send_decisions(host);  // its rank among them
  host.channel.send(Order::start, slot, 0, nlohmann::json(variables).dump());
}

bool RemoteProcesses::find_host(int slot) {
  std::vector<int> load(hosts_.size());
  for (const Slot& each : slots_) load[size_t(each.host)] += each.running;
  int& host = slots_[size_t(slot)].host;
  if (!hosts_[size_t(host)].lost) return true;
  int idlest = -1;
  for (int i = 0; i < int(hosts_.size()); ++i) {
    if (hosts_[size_t(i)].lost || (idlest >= 0 && load[size_t(i)] >= load[size_t(idlest)]))
      continue;
    idlest = i;
  }
  if (idlest < 0) return false;
  host = idlest;
  return true;
}

void RemoteProcesses::send_signal(int slot, int signal) {
  const Slot& state = slots_[size_t(slot)];
  if (!state.running) return;
  hosts_[size_t(state.host)].channel.send(Order::signal, slot, uint64_t(signal), "");
}

std::optional<ProcessEnd> RemoteProcesses::take_end(int slot) {
  Slot& state = slots_[size_t(slot)];
  if (state.end) state.running = false;
  return std::exchange(state.end, std::nullopt);
}

std::string RemoteProcesses::find_hang(int slot) {
  return std::exchange(slots_[size_t(slot)].hang, "");
}

void RemoteProcesses::add_descriptors(std::vector<pollfd>& to) const {
  for (const Host& host : hosts_) {
    for (const int stream : {0, 1}) to.push_back({host.shell.output(stream), POLLIN, 0});
    to.push_back({host.channel.fd(), host.channel.events(), 0});
  }
}

void RemoteProcesses::serve(std::span<const pollfd> ready) {
  for (size_t i = 0; i < ready.size(); ++i) {
    Host& host = hosts_[i / kDescriptorsOfHost];
    const int stream = int(i % kDescriptorsOfHost);
    if (stream < 2) {
      if (ready[i].revents != 0) pass_on(host, stream);
      continue;
    }
    if (!host.channel.open()) continue;
    const bool serves =
        host.channel.serve([&](uint64_t word, int slot, uint64_t value, std::string_view text) {
          receive(host, Report(word), slot, value, text);
        });
    if (!serves) {
      lose(host, "its executor has ended");
    } else if (host.channel.silence().count() > request_.host_timeout_s) {
      lose(host, fmt::format("no sign of life for {:.3g} s", request_.host_timeout_s));
    } else if (host.ready) {
      send_decisions(host);
    }
  }
}

void RemoteProcesses::receive(Host& host, Report report, int slot, uint64_t value,
                              std::string_view text) {
  if (slot < 0 || slot >= int(slots_.size())) return lose(host, "its executor sent another slot");
  Slot& state = slots_[size_t(slot)];
  switch (report) {
    case Report::build:
      return check_build(host, value != 0, text);
    case Report::started:
      state.pid = pid_t(value);
      return;
    case Report::output:
      return print_(slot, value == 0 ? 0 : 1, std::string(text));
    case Report::closed:
      state.has_output = false;
      return;
    case Report::hung:
      state.hang = text;
      return;
    case Report::ended:
      state.end = ProcessEnd{int(value), std::string(text)};
      return;
    case Report::failed:
      if (state.starts > 1) {
        state.has_output = false;
        state.end = ProcessEnd{SIGKILL, fmt::format("was not started: {}", text)};
        return;
      }
      throw InvalidArgument(fmt::format("host {}: {}", host.name, text));
    case Report::progress:
      if (board_ && !text.empty()) control::apply_progress(*board_, control::bytes_of(text));
      return;
  }
}

void RemoteProcesses::check_build(Host& host, bool allows_others, std::string_view text) {
  const Build local = this_build();
  if (text != local.text && !(allows_others && local.allowed == 1)) {
    throw Mismatch(
        fmt::format("launch: host {} runs {}; this host runs {}: expected the same program on all "
                    "hosts (TANDEM_ALLOW_MIXED_BUILDS=1 allows others)",
                    host.name, printable(text), local.text));
  }
  host.ready = true;
}

void RemoteProcesses::send_decisions(Host& host) {
  if (!host.channel.is_due(control::Clock::now()) && !board_) return;
  std::vector<std::byte> decisions;
  if (board_) decisions = control::read_decisions(*board_);
  if (!host.channel.is_due(control::Clock::now()) && decisions == host.decisions) return;
  host.channel.send(Order::decisions, 0, 0, control::text_of(decisions));
  host.decisions = std::move(decisions);
}

void RemoteProcesses::lose(Host& host, const std::string& why) {
  host.lost = true;
  host.channel.close();
  host.shell.send_signal(SIGKILL);
  if (!host.ready) throw Error(fmt::format("launch: host {}: {}", host.name, why));
  for (Slot& slot : slots_) {
    if (&hosts_[size_t(slot.host)] != &host) continue;
    slot.has_output = false;
    if (!slot.running || slot.end) continue;
    slot.end = ProcessEnd{SIGKILL, fmt::format("was lost with its host: {}", why)};
  }
}

}  // namespace tandem
