// Faults that `tandem launch --inject` causes in the processes of its ranks, and the report of
// which of them were noticed, when and whom the launcher blamed.
#pragma once

#include <signal.h>
#include <sys/types.h>

#include <chrono>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "comm/rendezvous/membership.h"
#include "engine/launch/processes/rank_processes.h"
#include "engine/train/checks/fault_plan.h"

namespace tandem {

/// Faults for ranks [0, ranks): of a file (engine/train/checks/fault_plan.h), or for `random:SEED`
/// or `random:SEED,RATE` of all kinds that a launcher can cause, in each step and rank with that
/// probability (0.01). Throws ConfigError, also for faults that it cannot cause; InvalidArgument
/// for a text that is neither.
FaultPlan launch_faults(const std::string& option, int ranks);

class LaunchInjector {
 public:
  using Clock = std::chrono::steady_clock;

  /// Max time between calls of `run`.
  static constexpr int kIntervalMs = 2;

  /// `board` and `processes`, whose slots are its own, must outlive this object. `first_step`: of
  /// those whose faults it causes. `out`: folder for faults.jsonl; empty: none is written.
  LaunchInjector(FaultPlan plan, const control::Board& board, RankProcesses& processes,
                 int64_t first_step, std::string out);

  /// Causes the faults of the steps that a rank has begun since the last call, and ends those whose
  /// time is over. A step that is repeated has its faults once.
  void run();
  /// Records that the launcher has blamed a slot's process: it was lost, or hangs and is being
  /// killed.
  void note_loss(int slot, const std::string& cause);
  /// Continues stopped processes, so that the launch can end them.
  void release();
  /// Writes OUT/faults.jsonl, a line for each fault and false alarm, and prints one line.
  void report() const;

 private:
  struct Injected {
    Fault fault;
    int slot;
    pid_t process;
    double time_s;  ///< since 1970
    Clock::time_point begin;
    std::optional<double> noticed_ms{};
    std::string cause{};  ///< as the launcher described it; empty: it noticed nothing
  };
  /// Process that is stopped for a while, once or in turns.
  struct Stopped {
    bool is_slow;
    double percent;
    std::optional<Clock::time_point> end;
    bool stopped;
    Clock::time_point change;  ///< when it is continued or stopped next
  };

  void inject(const Fault& fault, int slot);
  void advance(int slot, Stopped& state, Clock::time_point now);
  bool is_lost(int slot, const Injected& injected) const;

  const FaultPlan plan_;
  const control::Board& board_;
  RankProcesses& processes_;
  const std::string out_;
  int64_t next_step_;
  std::vector<Injected> injected_;
  std::map<std::pair<int, pid_t>, std::string> false_alarms_;  ///< cause by slot and process
  std::map<int, Stopped> stopped_;                             ///< by slot
};

}  // namespace tandem
