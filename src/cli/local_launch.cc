#include "cli/local_launch.h"

#include <fmt/format.h>
#include <poll.h>
#include <sys/signalfd.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstring>
#include <memory>
#include <optional>
#include <utility>

#include "cli/launch_members.h"
#include "cli/launched_process.h"
#include "cli/output.h"
#include "comm/processes/snapshot_memory_file.h"
#include "comm/rendezvous/endpoint.h"
#include "comm/rendezvous/launch.h"
#include "comm/rendezvous/secret.h"
#include "core/env.h"
#include "core/file_limit.h"
#include "core/printable.h"
#include "tandem/error.h"

namespace tandem::cli {
namespace {

using LaunchClock = std::chrono::steady_clock;
using control::Connection;

/// After a rank has failed: until the others are asked to end, and until they are killed.
constexpr auto kAskAfter = std::chrono::seconds(5), kKillAfter = std::chrono::seconds(15);
constexpr auto kDrain = std::chrono::seconds(2);  ///< for output after the last rank's end
constexpr int kPort = 29500;                      ///< part of a name only: no port is open
/// Intervals of checks: in recovery, for hanging ranks, at the end.
constexpr int kRecoveryMs = 10, kWatchMs = 50, kEndMs = 200;

class LocalLaunch {
 public:
  explicit LocalLaunch(const LaunchRequest& request)
      : request_(request), processes_(size_t(request.ranks + request.spares)) {
    launch_.size = request.ranks;
    launch_.host = "127.0.0.1";
    launch_.port = kPort;
    launch_.one_host = true;
    run_id_ = std::string(kLauncherRunId) + control::hex_of(control::random_digest());
    if (request.replaces()) members_.emplace(request, launch_, run_id_);
    sigemptyset(&watched_);
    for (const int signal : {SIGINT, SIGTERM, SIGHUP, SIGUSR1, SIGUSR2, SIGCHLD})
      sigaddset(&watched_, signal);
    sigprocmask(SIG_BLOCK, &watched_, &before_);
    signals_ = Connection(signalfd(-1, &watched_, SFD_CLOEXEC | SFD_NONBLOCK));
  }
  ~LocalLaunch() {
    send_signal(SIGKILL);
    for (LaunchedProcess& process : processes_) process.wait_for_end();
    sigprocmask(SIG_SETMASK, &before_, nullptr);
  }
  LocalLaunch(const LocalLaunch&) = delete;
  LocalLaunch& operator=(const LocalLaunch&) = delete;

  int run() {
    std::unique_ptr<control::StoreServer> store;
    if (members_) {
      members_->begin();
    } else if (request_.ranks > 1) {
      store = start_store(launch_, run_id_);
    }
    for (size_t slot = 0; slot < processes_.size(); ++slot) start(int(slot));
    while (is_running()) serve();
    // Processes that a rank has left may keep its output open.
    const auto end = LaunchClock::now() + kDrain;
    while (LaunchClock::now() < end &&
           std::ranges::any_of(processes_, [](const LaunchedProcess& process) {
             return process.output(0) >= 0 || process.output(1) >= 0;
           })) {
      serve();
    }
    return status_;
  }

 private:
  bool is_running() const { return std::ranges::any_of(processes_, &LaunchedProcess::running); }
  std::string label(int slot) const {
    return members_ ? members_->label(slot) : fmt::to_string(slot);
  }

  void start(int slot) {
    const std::string size = std::to_string(request_.ranks), rank = label(slot);
    Variables variables{{"RANK", rank},
                        {"LOCAL_RANK", rank},
                        {"WORLD_SIZE", size},
                        {"LOCAL_WORLD_SIZE", size},
                        {"MASTER_ADDR", launch_.host},
                        {"MASTER_PORT", std::to_string(kPort)},
                        {"TORCHELASTIC_RUN_ID", run_id_},
                        // The launcher's store has a secret of its own.
                        {"TORCHELASTIC_USE_AGENT_STORE", ""},
                        {"TANDEM_SECRET", ""},
                        {"TANDEM_SECRET_FILE", ""}};
    std::vector<int> shared;
    if (members_) shared.push_back(members_->board().fd());
    variables.emplace_back(control::kMembershipVariable,
                           members_ ? control::Member::describe(members_->board(), slot) : "");
    if (memory_.open()) {
      shared.push_back(memory_.fd());
      variables.emplace_back(processes::kSnapshotMemoryVariable, std::to_string(memory_.fd()));
    }
    processes_[size_t(slot)].start(request_.command, variables, shared, before_);
    if (members_) members_->note_process(slot, processes_[size_t(slot)].pid());
  }

  /// After its last output is shown.
  void restart(int slot) {
    for (const int stream : {0, 1}) {
      pollfd output{processes_[size_t(slot)].output(stream), POLLIN, 0};
      while (output.fd >= 0 && poll(&output, 1, 0) > 0) {
        pass_on(size_t(slot), stream);
        output.fd = processes_[size_t(slot)].output(stream);
      }
    }
    start(slot);
  }

  void serve() {
    std::vector<pollfd> waiting{{signals_.fd(), POLLIN, 0}};
    for (const LaunchedProcess& process : processes_) {
      for (int stream : {0, 1}) waiting.push_back({process.output(stream), POLLIN, 0});
    }
    const bool recovers = members_ && members_->is_recovering();
    const int interval = recovers                   ? kRecoveryMs
                         : members_                 ? kWatchMs
                         : !failed_ && is_running() ? -1
                                                    : kEndMs;
    poll(waiting.data(), waiting.size(), interval);
    for (size_t i = 1; i < waiting.size(); ++i) {
      if (waiting[i].revents != 0) pass_on((i - 1) / 2, int((i - 1) % 2));
    }
    signalfd_siginfo signal{};
    while (read(signals_.fd(), &signal, sizeof signal) == ssize_t(sizeof signal)) {
      const int number = int(signal.ssi_signo);
      if (number == SIGCHLD) continue;
      stopping_ |= number != SIGUSR1 && number != SIGUSR2;
      send_signal(number);
    }
    reap();
    if (members_ && !failed_) end_hanging();
    if (recovers && !failed_) members_->check_recovered();
    if (!failed_) return;
    const auto since = LaunchClock::now() - *failed_;
    if (since > kAskAfter && !std::exchange(asked_, true)) send_signal(SIGTERM);
    if (since > kKillAfter) send_signal(SIGKILL);
  }

  void send_signal(int signal) const {
    for (const LaunchedProcess& process : processes_) process.send_signal(signal);
  }

  void pass_on(size_t slot, int stream) {
    processes_[slot].pass_on(stream,
                             processes_.size() == 1 ? "" : fmt::format("[{}] ", label(int(slot))));
  }

  void reap() {
    for (size_t slot = 0; slot < processes_.size(); ++slot) {
      int status = 0;
      if (!processes_[slot].has_ended(status)) continue;
      if (members_ && members_->is_spare(int(slot))) {
        end_spare(int(slot), status);
      } else if (status == 0 || (members_ && members_->is_done(int(slot)) && WIFSIGNALED(status))) {
        end_rank();
      } else if (!failed_) {
        lose_rank(int(slot), status);
      }
    }
  }

  void end_hanging() {
    for (size_t slot = 0; slot < processes_.size(); ++slot) {
      const LaunchedProcess& process = processes_[slot];
      if (process.running() && members_->hangs(int(slot), process.pid())) {
        process.send_signal(SIGKILL);
      }
    }
  }

  static std::string describe_end(int status) {
    return WIFSIGNALED(status) ? fmt::format("was ended by signal {}, {}", WTERMSIG(status),
                                             strsignal(WTERMSIG(status)))
                               : fmt::format("ended with exit status {}", WEXITSTATUS(status));
  }

  void end_spare(int slot, int status) {
    if (status != 0 && !stopping_ && !failed_) {
      complain(fmt::format("tandem: launch: a spare (process {}) {}",
                           processes_[size_t(slot)].pid(), describe_end(status)));
    }
    members_->remove_spare(slot);
  }

  void end_rank() {
    if (members_ && ++ended_ == members_->ranks()) members_->close(false);
  }

  void lose_rank(int slot, int status) {
    const bool killed = WIFSIGNALED(status);
    LostProcess lost{slot, processes_[size_t(slot)].pid(), describe_end(status)};
    std::string reason;
    if (members_ && killed && !stopping_ && ended_ == 0) {
      const int heir = members_->replace(lost, reason);
      if (heir == slot) restart(slot);
      if (heir != LaunchMembers::kNotReplaced) return;
    }
    failed_ = LaunchClock::now();
    status_ = killed ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
    complain(fmt::format("tandem: launch: rank {} (process {}) {}{}{}", label(slot), lost.pid,
                         lost.cause, reason.empty() ? "" : ": ", reason));
    if (!members_) return;
    members_->note_stop(lost, reason);
    members_->close(killed && !stopping_);
  }

  const LaunchRequest request_;
  std::vector<LaunchedProcess> processes_;
  Launch launch_;
  std::string run_id_;
  std::optional<LaunchMembers> members_;  ///< if ranks can be replaced
  sigset_t watched_{}, before_{};
  Connection signals_;
  /// Memory of the ranks' snapshots, unless this process was given one, which they inherit.
  const Connection memory_{env().snapshot_memory < 0 ? processes::create_snapshot_memory() : -1};
  std::optional<LaunchClock::time_point> failed_;  ///< when a rank failed that was not replaced
  int ended_ = 0;                                  ///< ranks whose work has ended well
  bool asked_ = false;
  bool stopping_ = false;  ///< a signal to stop was passed on
  int status_ = 0;
};

/// Throws InvalidArgument unless processes of the command can take another's rank.
void check_replaceable(const LaunchRequest& request) {
  if (!request.replaces()) return;
  const auto& command = request.command;
  const std::string program = command.front().substr(command.front().rfind('/') + 1);
  if (program == "tandem" && command.size() > 1 && command[1] == "train") return;
  throw InvalidArgument(
      fmt::format("launch --{}: command {}: expected tandem train, whose ranks can be replaced",
                  request.spares > 0     ? "spares"
                  : request.restarts > 0 ? "restarts"
                                         : "min-dp",
                  printable(command.front())));
}

}  // namespace

int launch_here(const LaunchRequest& request) {
  check_replaceable(request);
  constexpr int kFilesOfRank = 3, kOtherFiles = 300;
  const int files = raise_file_limit(), needed = kFilesOfRank * request.ranks + kOtherFiles;
  if (files < needed) {
    throw Unsupported(fmt::format("{} ranks: a process may open {} files: expected {} (ulimit -n)",
                                  request.ranks, files, needed));
  }
  return LocalLaunch(request).run();
}

}  // namespace tandem::cli
