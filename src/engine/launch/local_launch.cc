#include "engine/launch/local_launch.h"

#include <fmt/format.h>
#include <poll.h>
#include <sys/signalfd.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <memory>
#include <optional>
#include <span>
#include <utility>

#include "comm/processes/shared/snapshot_memory_file.h"
#include "comm/rendezvous/launch.h"
#include "comm/rendezvous/secret.h"
#include "core/system/console.h"
#include "core/system/files.h"
#include "core/system/process/file_limit.h"
#include "engine/checkpoint/checkpoint.h"
#include "engine/checkpoint/run/run_lock.h"
#include "engine/checkpoint/snapshot/snapshot_memory.h"
#include "engine/launch/launch_checks.h"
#include "engine/launch/launch_injector.h"
#include "engine/launch/launch_members.h"
#include "engine/launch/launch_supervisor.h"
#include "engine/launch/live_process.h"
#include "engine/launch/processes/launched_process.h"
#include "engine/launch/processes/local_processes.h"
#include "engine/launch/processes/remote_processes.h"
#include "engine/launch/slow_ranks.h"
#include "engine/launch/stop_signals.h"
#include "tandem/error.h"

namespace tandem {
namespace {

using LaunchClock = std::chrono::steady_clock;
using control::Connection;

/// After a rank has failed: until the others are asked to end, and until they are killed.
constexpr auto kAskAfter = std::chrono::seconds(5), kKillAfter = std::chrono::seconds(15);
constexpr auto kDrain = std::chrono::seconds(2);  ///< for output after the last rank's end
constexpr int kPort = 29500;                      ///< on one host: no port is open
constexpr double kLockPatienceS = 1;
constexpr const char* kLaunchLock = ".launch.lock";  ///< in the training's output
/// Intervals of checks: in recovery, for hanging ranks, at the end.
constexpr int kRecoveryMs = 10, kWatchMs = 50, kEndMs = 200;
/// Exit codes of ranks that have missed another one.
constexpr int kTimeout = 5, kAborted = 6;

std::string new_run_id(const LaunchRequest& request) {
  return std::string(request.hosts.empty() ? kLauncherRunId : kHostsRunId) +
         control::hex_of(control::random_digest());
}

class RunningLaunch {
 public:
  /// `board`: nullptr if ranks cannot be replaced. `snapshot_memory` and `mask`: as of
  /// LocalProcesses.
  RunningLaunch(const LaunchRequest& request, const std::string& run_id, int snapshot_memory,
                const sigset_t& mask, control::Board* board, const LostLauncher* lost)
      : request_(request),
        slots_(request.ranks + request.spares),
        run_id_(run_id),
        snapshot_memory_(snapshot_memory) {
    std::optional<FaultPlan> faults;
    if (!request.inject.empty()) faults = launch_faults(request.inject, request.ranks);
    launch_.size = request.ranks;
    launch_.one_host = request.hosts.empty();
    launch_.port = launch_.one_host && request.port == 0 ? kPort : request.port;
    if (request.port > 0) launch_.port_from = "--port";
    sigaddset(&watched_, SIGCHLD);
    sigprocmask(SIG_BLOCK, &watched_, &before_);
    signals_ = Connection(signalfd(-1, &watched_, SFD_CLOEXEC | SFD_NONBLOCK));
    start_hosts(mask);
    if (board) members_.emplace(request, launch_, secret_, *board, lost, *processes_);
    if (members_ && !request.out.empty()) slow_ranks_.emplace(training_output(request));
    if (faults) {
      injector_.emplace(*faults, members_->board(), *processes_, members_->first_step(),
                        request.out);
    }
  }
  ~RunningLaunch() {
    processes_.reset();
    sigprocmask(SIG_SETMASK, &before_, nullptr);
  }
  RunningLaunch(const RunningLaunch&) = delete;
  RunningLaunch& operator=(const RunningLaunch&) = delete;

  int run() {
    if (members_) members_->begin();
    start_all();
    while (is_running()) serve();
    if (injector_) injector_->report();
    injector_.reset();
    if (failed_ && !stopping_) save_snapshot();
    drain();
    return status_;
  }

  /// Whether it ended because a rank was killed, or had missed another one.
  bool has_lost_rank() const { return has_lost_rank_; }

  /// Only saves what a launcher before has left.
  void save() {
    save_snapshot();
    drain();
  }

 private:
  /// Starts the ranks to write the newest snapshot that is in memory to disk, if none is there that
  /// is as new, and to end.
  void save_snapshot() {
    std::string unsaved = "what snapshots in memory have";
    try {
      unsaved = find_unsaved_snapshot();
      if (unsaved.empty()) return;
      saves_ = true;
      asked_ = false;
      failed_.reset();
      save_until_ = control::after(request_.start_timeout_s);
      if (members_) members_->begin_saving();
      start_all();
    } catch (const Error& error) {
      fail_to_save(error.what());
    }
    while (is_running()) serve();
    if (failed_) complain(fmt::format("tandem: launch: {} is not saved", unsaved));
  }

  void drain() {
    // Processes that a rank has left may keep its output open.
    const auto end = LaunchClock::now() + kDrain;
    while (LaunchClock::now() < end &&
           any_slot([this](int slot) { return processes_->has_output(slot); })) {
      serve();
    }
  }

  /// Starts the processes of the ranks, and of the spares unless they are to save.
  void start_all() {
    if (!members_ && request_.ranks > 1) {
      store_ = {};
      store_ = start_store(launch_, run_id_, secret_);
    }
    for (int slot = 0; slot < slots_; ++slot) {
      if (!saves_ || !members_ || members_->has_rank(slot)) start(slot);
    }
  }

  /// Snapshot of all ranks in memory that is newer than the checkpoints on disk, for messages;
  /// empty: there is none. Of the memory of other hosts it is not known here.
  std::string find_unsaved_snapshot() const {
    const std::string out = training_output(request_);
    if (!runs_tandem(request_.command, "train") || out.empty()) return "";
    if (!launch_.one_host) {
      const bool has_trained = !members_ || finished_steps(members_->board()) > 0;
      return status_ > 128 && has_trained ? "what snapshots in memory have" : "";
    }
    const int processes = members_ ? members_->ranks() : request_.ranks;
    // The ranks of one process are threads.
    const auto step = newest_snapshot(snapshot_memory_, processes > 1 ? processes : 0);
    const std::vector<std::string> checkpoints = list_checkpoints(out);
    if (!step || (!checkpoints.empty() && checkpoint_step(checkpoints.front()) >= step)) return "";
    return fmt::format("step {}, of which snapshots are in memory,", *step);
  }

  void fail_to_save(const std::string& why) {
    complain("tandem: launch: " + why);
    failed_ = LaunchClock::now();
    if (members_) members_->close(control::kClosedByLoss);
  }

  template <typename Condition>
  bool any_slot(const Condition& condition) const {
    for (int slot = 0; slot < slots_; ++slot) {
      if (condition(slot)) return true;
    }
    return false;
  }
  bool is_running() const {
    return any_slot([this](int slot) { return processes_->is_running(slot); });
  }
  std::string label(int slot) const {
    return members_ ? members_->label(slot) : fmt::to_string(slot);
  }
  std::string name_process(int slot) const {
    const pid_t pid = processes_->pid(slot);
    return launch_.one_host ? fmt::format("process {}", pid)
                            : fmt::format("process {} on {}", pid, processes_->host(slot));
  }

  void start_hosts(const sigset_t& mask) {
    const auto print = [this](int slot, int stream, const std::string& line) {
      if (request_.print) return request_.print(slot, stream, line);
      print_line(stream, slots_ == 1 ? line : fmt::format("[{}] {}", label(slot), line));
    };
    if (launch_.one_host) {
      processes_ =
          std::make_unique<LocalProcesses>(slots_, request_.command, mask, snapshot_memory_, print);
      return;
    }
    const std::string secret = control::hex_of(control::random_digest());
    secret_ = control::read_secret(secret, "");
    auto remote = std::make_unique<RemoteProcesses>(request_, run_id_, secret, mask, print);
    remote->connect(signals_.fd());
    processes_ = std::move(remote);
  }

  /// Index of the slot's rank among those of its host, and their number, when the launch begins.
  std::pair<int, int> local_rank(int slot) const {
    int lower = 0, all = 0;
    for (int rank = 0; rank < request_.ranks; ++rank) {
      if (processes_->host_index(rank) != processes_->host_index(slot)) continue;
      ++all;
      lower += rank < slot;
    }
    return {lower, all};
  }

  void start(int slot) {
    const auto [local_rank, local_size] = this->local_rank(slot);
    const std::string rank = label(slot);
    Variables variables{
        {"RANK", rank},
        {"LOCAL_RANK", slot < request_.ranks ? std::to_string(local_rank) : rank},
        {"WORLD_SIZE", std::to_string(request_.ranks)},
        {"LOCAL_WORLD_SIZE", std::to_string(local_size)},
        {"MASTER_PORT", std::to_string(store_.port > 0 ? store_.port : launch_.port)},
        {"TORCHELASTIC_RUN_ID", run_id_},
        // The launcher's store has a secret of its own.
        {"TORCHELASTIC_USE_AGENT_STORE", ""}};
    if (launch_.one_host) {
      variables.insert(
          variables.end(),
          {{"MASTER_ADDR", "127.0.0.1"}, {"TANDEM_SECRET", ""}, {"TANDEM_SECRET_FILE", ""}});
    }
    variables.emplace_back(processes::kSnapshotToDiskVariable, saves_ ? "1" : "");
    processes_->start(slot, variables);
  }

  void serve() {
    std::vector<pollfd> waiting{{signals_.fd(), POLLIN, 0}};
    processes_->add_descriptors(waiting);
    const bool recovers = members_ && members_->is_recovering();
    const int interval = injector_  ? LaunchInjector::kIntervalMs
                         : recovers ? kRecoveryMs
                         : members_ ? kWatchMs
                         : launch_.one_host && !failed_ && !saves_ && is_running() ? -1
                                                                                   : kEndMs;
    poll(waiting.data(), waiting.size(), interval);
    processes_->serve(std::span(waiting).subspan(1));
    signalfd_siginfo signal{};
    while (read(signals_.fd(), &signal, sizeof signal) == ssize_t(sizeof signal)) {
      const int number = int(signal.ssi_signo);
      if (number == SIGCHLD) continue;
      stopping_ |= number != SIGUSR1 && number != SIGUSR2;
      send_signal(number);
    }
    saves_ ? reap_saving() : reap();
    if (injector_) inject();
    const bool watches = members_ && !failed_ && !saves_;
    if (watches && members_->was_complete()) end_waiting();
    if (watches) end_hanging();
    if (slow_ranks_) {
      for (const report::SlowRank& slow : slow_ranks_->take()) members_->note_slow(slow);
    }
    if (recovers && watches) members_->check_recovered();
    if (!failed_) return;
    const auto since = LaunchClock::now() - *failed_;
    if (since > kAskAfter && !std::exchange(asked_, true)) {
      send_signal(SIGTERM);
      send_signal(SIGCONT);  // of stopped ones, too
    }
    if (since > kKillAfter) send_signal(SIGKILL);
  }

  void inject() {
    if (failed_ || stopping_) return injector_->release();
    injector_->run();
  }

  void note_fault(int slot, const std::string& cause) {
    if (injector_ && !stopping_) injector_->note_loss(slot, cause);
  }

  void send_signal(int signal) const {
    for (int slot = 0; slot < slots_; ++slot) processes_->send_signal(slot, signal);
  }

  void reap() {
    std::vector<std::pair<int, ProcessEnd>> ends;
    for (int slot = 0; slot < slots_; ++slot) {
      const auto end = processes_->take_end(slot);
      if (!end) continue;
      if (members_ && members_->is_spare(slot)) {
        end_spare(slot, *end);  // before a rank that is lost with it could be given to it
      } else {
        ends.emplace_back(slot, *end);
      }
    }
    for (const auto& [slot, end] : ends) {
      const bool done = members_ && members_->is_complete() && WIFSIGNALED(end.status);
      if (end.status == 0 || done) {
        if (end.status != 0 && !ends_waiting_) note_fault(slot, end.cause);
        if (end.status != 0) members_->close(control::kClosedComplete);
        end_rank();
      } else if (!failed_) {
        lose_rank(slot, end);
      }
    }
  }

  void reap_saving() {
    for (int slot = 0; slot < slots_; ++slot) {
      const auto end = processes_->take_end(slot);
      if (!end || failed_ || (WIFEXITED(end->status) && WEXITSTATUS(end->status) == kStopped)) {
        continue;
      }
      fail_to_save(fmt::format("rank {} ({}) {}", label(slot), name_process(slot), end->cause));
    }
    if (failed_ || LaunchClock::now() < save_until_) return;
    fail_to_save(fmt::format("no end within {:.3g} s", request_.start_timeout_s));
  }

  void end_hanging() {
    for (int slot = 0; slot < slots_; ++slot) {
      if (!processes_->is_running(slot)) continue;
      const std::string cause = members_->check_hang(slot);
      if (cause.empty()) continue;
      processes_->send_signal(slot, SIGKILL);
      note_fault(slot, cause);
    }
  }

  /// Ends processes that have begun a generation for a rank that was lost when the result was
  /// complete.
  void end_waiting() {
    ends_waiting_ = true;
    for (int slot = 0; slot < slots_; ++slot) {
      if (!members_->is_spare(slot) && !members_->is_done(slot)) {
        processes_->send_signal(slot, SIGKILL);
      }
    }
  }

  void end_spare(int slot, const ProcessEnd& end) {
    if (end.status != 0 && !stopping_ && !failed_) {
      complain(fmt::format("tandem: launch: a spare ({}) {}", name_process(slot), end.cause));
    }
    members_->remove_spare(slot);
  }

  void end_rank() {
    if (members_ && ++ended_ == members_->ranks()) members_->close(control::kClosed);
  }

  void lose_rank(int slot, const ProcessEnd& end) {
    const bool killed = WIFSIGNALED(end.status);
    LostProcess lost{slot, processes_->pid(slot), end.cause};
    const std::string lost_label = label(slot), process = name_process(slot);
    std::string reason;
    if (killed) note_fault(slot, lost.cause);
    if (members_ && killed && !stopping_ && ended_ == 0) {
      const int heir = members_->replace(lost, reason);
      if (heir == slot) start(slot);
      if (heir != LaunchMembers::kNotReplaced) return;
    }
    failed_ = LaunchClock::now();
    status_ = killed ? 128 + WTERMSIG(end.status) : WEXITSTATUS(end.status);
    has_lost_rank_ = !stopping_ && (killed || status_ == kTimeout || status_ == kAborted);
    if (killed || !request_.print) {
      complain(fmt::format("tandem: launch: rank {} ({}) {}{}{}", lost_label, process, lost.cause,
                           reason.empty() ? "" : ": ", reason));
    }
    if (!members_) return;
    members_->note_stop(lost, reason);
    members_->close(killed && !stopping_ ? control::kClosedByLoss : control::kClosed);
  }

  const LaunchRequest request_;
  const int slots_;
  Launch launch_;
  const std::string run_id_;
  const int snapshot_memory_;
  control::Secret secret_;  ///< of ranks on several hosts
  sigset_t watched_ = watched_signals(), before_{};
  Connection signals_;
  std::unique_ptr<RankProcesses> processes_;
  std::optional<LaunchMembers> members_;  ///< if ranks can be replaced
  std::optional<LaunchInjector> injector_;
  std::optional<SlowRanks> slow_ranks_;
  LaunchStore store_{};                            ///< if they cannot
  std::optional<LaunchClock::time_point> failed_;  ///< when a rank failed that was not replaced
  int ended_ = 0;                                  ///< ranks whose work has ended well
  bool asked_ = false;
  bool ends_waiting_ = false;
  bool saves_ = false;  ///< ranks only write their newest snapshot
  LaunchClock::time_point save_until_{};
  bool stopping_ = false;  ///< a signal to stop was passed on
  int status_ = 0;
  bool has_lost_rank_ = false;
};

/// Ranks that start again, all, when one is lost.
int run_restarting(const LaunchRequest& request, int snapshot_memory, const sigset_t& mask) {
  for (int left = request.restarts;; --left) {
    RunningLaunch launch(request, new_run_id(request), snapshot_memory, mask, nullptr, nullptr);
    const int status = launch.run();
    if (!launch.has_lost_rank() || left == 0) return status;
    complain(fmt::format("tandem: launch: starting all ranks again (restart {} of {})",
                         request.restarts - left + 1, request.restarts));
  }
}

}  // namespace

int run_launch(const LaunchRequest& given) {
  check_replaceable(given);
  LaunchRequest request = given;
  if (!request.live.empty()) request.out = live_folder(given);
  signal(SIGCHLD, SIG_DFL);  // ignored ones have no status to wait for
  constexpr int kFilesOfProcess = 3, kOtherFiles = 300;
  const int processes = request.ranks + request.spares, files = raise_file_limit();
  const int needed = kFilesOfProcess * processes + kOtherFiles;
  if (files < needed) {
    throw Unsupported(
        fmt::format("{} processes: this one may open {} files: expected {} (ulimit -n)", processes,
                    files, needed));
  }
  sigset_t mask;
  sigprocmask(SIG_BLOCK, nullptr, &mask);
  hold_save_requests();
  std::optional<RunLock> lock;
  if (const std::string out = training_output(request); request.replaces() && !out.empty()) {
    make_directories(out);
    lock.emplace(out, kLockPatienceS, kLaunchLock);
  }
  const LiveProcess live(request.live, request.out);
  const std::string run_id = new_run_id(request);
  const control::Connection memory = make_snapshot_memory();
  if (restarts_all(request)) return run_restarting(request, memory.fd(), mask);
  if (!request.replaces()) {
    return RunningLaunch(request, run_id, memory.fd(), mask, nullptr, nullptr).run();
  }
  control::Board board(request.ranks + request.spares, run_id);
  const auto launch = [&](const LostLauncher* lost) {
    RunningLaunch running(request, run_id, memory.fd(), mask, &board, lost);
    if (!lost || !lost->is_last) return running.run();
    running.save();
    return 0;
  };
  // Executors on other hosts end their ranks later than this process could start new ones.
  return request.hosts.empty() ? supervise(launch, [&] { return finished_steps(board); })
                               : launch(nullptr);
}

}  // namespace tandem
