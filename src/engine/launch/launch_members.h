// Ranks of a `tandem launch` whose processes can be replaced, as its membership board says them
// (comm/rendezvous/membership.h). A process is a slot: first those of the ranks, then the spares.
#pragma once

#include <chrono>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "comm/rendezvous/launch.h"
#include "comm/rendezvous/membership.h"
#include "comm/rendezvous/secret.h"
#include "comm/rendezvous/store_server.h"
#include "engine/launch/launch_events.h"
#include "engine/launch/launch_supervisor.h"
#include "engine/launch/local_launch.h"
#include "engine/launch/processes/rank_processes.h"

namespace tandem {

/// Rendezvous store of a launch.
struct LaunchStore {
  std::unique_ptr<control::StoreServer> server;
  int port;  ///< on which it listens; 0: a local socket
};
/// Starts it, on any port if the launch has several hosts. `secret`: of those. Throws IoError.
LaunchStore start_store(Launch launch, const std::string& run_id, const control::Secret& secret);

/// Process that ended although its rank's work had not.
struct LostProcess {
  int slot;
  pid_t pid;
  std::string cause;  ///< "was ended by signal 9, Killed"
};

/// Steps that some rank had finished when it began its last one; -1: none has begun.
int64_t finished_steps(const control::Board& board);

class LaunchMembers {
 public:
  static constexpr int kNotReplaced = -1, kFewerRanks = -2, kLauncher = -3;

  /// `processes` must have ended before this object is destroyed; `board` must outlive it. `lost`:
  /// launcher that had the board before, whose ranks have ended; nullptr: none.
  LaunchMembers(const LaunchRequest& request, const Launch& launch, const control::Secret& secret,
                control::Board& board, const LostLauncher* lost, RankProcesses& processes);

  /// Begins the first generation of this launcher.
  void begin() { begin_generation(); }
  int ranks() const { return launch_.size; }
  const control::Board& board() const { return board_; }
  /// First step that no rank has begun, with this launcher or one before.
  int64_t first_step() const { return max_step_ + 2; }
  bool is_spare(int slot) const { return board_.slot(slot).rank == control::kSpare; }
  bool has_rank(int slot) const { return board_.slot(slot).rank >= 0; }
  bool is_done(int slot) const { return board_.slot(slot).done != 0; }
  /// Whether a rank's work has ended well: it is then past the last exchange with the others, and
  /// the result is complete.
  bool is_complete() const;
  /// Whether that was in an earlier generation: ranks of this one wait for it in vain.
  bool was_complete() const;
  /// Rank of a slot's process for messages: "3", or "spare".
  std::string label(int slot) const;

  /// Reason why the slot's process hangs, or asks to be replaced, and must be killed, once; its
  /// loss then has that cause. Empty: there is none.
  std::string check_hang(int slot);
  /// Finds a process for the lost one's rank and begins a generation with it. Returns its slot,
  /// which is the lost one's if a new process must be started there. Else begins one with fewer
  /// replicas, and returns kFewerRanks; or kNotReplaced, and then `reason` says why. Corrects the
  /// cause of a process that was killed because it hung.
  int replace(LostProcess& lost, std::string& reason);
  void remove_spare(int slot) { board_.reset_slot(slot, control::kVacant); }
  /// Whether some rank does not train again yet.
  bool is_recovering() const { return !losses_.empty(); }
  /// Reports losses once all ranks train again.
  void check_recovered();
  /// Begins a last generation, of new processes in the slots that have a rank, after all have
  /// ended. Throws Error if no host is left.
  void begin_saving();
  /// No generation follows: spares end, and ranks as `how`, a value of BoardHead::closed, says.
  void close(uint32_t how);
  /// Records a rank that is slow; it keeps its process.
  void note_slow(const report::SlowRank& slow) { events_.add(slow); }
  /// Records that the launch ends because of that process.
  void note_stop(const LostProcess& lost, const std::string& reason);

 private:
  using Clock = std::chrono::steady_clock;
  struct Hang {
    const char* event;  ///< "hung", "corrupt" or "lost"
    std::string cause;
    Clock::time_point noticed;
  };
  struct Loss {
    LaunchEvent event;
    int heir;          ///< slot of the process that has its rank now; kFewerRanks, kLauncher
    int64_t finished;  ///< steps, by any rank
    Clock::time_point noticed;
  };

  void begin_generation();
  LaunchEvent describe(const char* event, const LostProcess& lost) const;
  void note_launcher(const LostLauncher& lost);
  /// One line on a loss after which all ranks train again.
  std::string report(const Loss& loss) const;
  /// "812", or "812 on node3" if there are several hosts.
  std::string name_process(int process, const std::string& host) const;
  int find_spare() const;
  /// Gives the ranks of the replica of `rank`, or of those that share its experts, to none and
  /// numbers the others anew. False if too few would be left.
  bool remove_replica(int rank);

  Launch launch_;  ///< its size: ranks of this generation
  const control::Secret secret_;
  RankProcesses& processes_;
  const int min_dp_;
  const double start_timeout_s_;
  int restarts_left_;
  Clock::time_point began_;  ///< this generation
  control::Board& board_;
  std::vector<LaunchStore> stores_;  ///< the last: of this generation
  std::map<int, Hang> hangs_;        ///< by slot, of processes that are being killed
  EventLog events_;
  std::vector<Loss> losses_;
  int64_t max_step_ = -1;  ///< finished by any rank before the last loss
  std::string last_loss_;  ///< rank and cause
  int fruitless_ = 0;      ///< such losses in a row without a further step
};

}  // namespace tandem
