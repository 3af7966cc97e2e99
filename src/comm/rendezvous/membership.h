// Membership board of `tandem launch --spares`: shared memory of the launcher and the processes
// that it started, inherited as a file descriptor. The launcher says there which process is which
// rank; a change of ranks is a new generation, with a rendezvous store of its own. Each process
// says which generation it trains in and how far it is.
//
// The launcher alone writes ranks and generations, a generation's ranks before its number. The
// words of a process that has died stay until its slot is reused, so that the launcher can read
// what it was doing.
//
// A launch on several hosts has a board on each, which its executor mirrors (board_mirror.h).
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <string>
#include <utility>

#include "observe/progress_words.h"

namespace tandem::control {

/// Variable that passes the board on to processes: its descriptor and the slot.
constexpr const char* kMembershipVariable = "TANDEM_MEMBERSHIP";

/// Ranks of slots without one: a process that waits for a rank, and a slot without a process.
constexpr int kSpare = -1, kVacant = -2;

/// Values of BoardHead::closed: all ranks' work has ended; a rank was lost and not replaced; a rank
/// was lost when the result was complete, so the others may end where they are.
constexpr uint32_t kClosed = 1, kClosedByLoss = 2, kClosedComplete = 3;

/// Reasons of a process to ask for its own replacement.
enum class ProcessFault : uint32_t {
  none,
  corrupt,   ///< a check has found its data corrupt
  lost_gpu,  ///< all calls to its GPU fail
};

struct MemberSlot {
  std::atomic<int32_t> rank;
  std::atomic<int32_t> host;           ///< index of its host: slots of one host have the same
  std::atomic<uint32_t> training;      ///< generation in which it trains; 0: none yet
  std::atomic<uint32_t> done;          ///< 1 once its rank's work has ended well
  std::atomic<ProcessFault> fault;     ///< of its process, which asks to be replaced
  std::atomic<int64_t> step;           ///< finished steps when it began the last one; -1: none yet
  std::atomic<int64_t> first_step;     ///< `step` when it began to train in that generation,
  std::atomic<int64_t> first_step_ns;  ///< and the steady clock then
  ProgressWords words;
};

struct BoardHead {
  std::atomic<uint32_t> changes;     ///< futex word: grows with each change by the launcher
  std::atomic<uint32_t> generation;  ///< from 1
  std::atomic<uint32_t> closed;      ///< not 0: no generation will follow
  std::atomic<uint32_t> has_output;  ///< 1 once the output folder holds this run
  std::atomic<uint32_t> resumes;     ///< has_output when the generation began
  std::atomic<int32_t> size;         ///< ranks of the generation
  std::atomic<int32_t> tp, dp, pp;   ///< its layout, once known: ranks of each axis (0: unknown),
  std::atomic<int32_t> ep;           ///< and data-parallel ranks that share the experts
  std::atomic<int32_t> min_dp;       ///< fewest data-parallel ranks to continue with; 0: all
  std::atomic<int32_t> port;         ///< of the generation's store; 0: a local socket
  std::atomic<double> rank_flops;    ///< measured peak of a rank; 0: not yet
  int32_t slots;
  char run_id[104];
};

/// The mapped board.
class Board {
 public:
  /// Creates it, in the launcher. Throws IoError.
  Board(int slots, const std::string& run_id);
  /// Maps an inherited one. Throws InvalidArgument if `fd` is none.
  explicit Board(int fd);
  ~Board();
  Board(const Board&) = delete;
  Board& operator=(const Board&) = delete;

  int fd() const { return fd_; }
  BoardHead& head() const { return *head_; }
  MemberSlot& slot(int index) const;
  /// Gives a slot to a new process.
  void reset_slot(int index, int rank);
  /// Index of a slot's rank among the ranks of its host, and their number.
  std::pair<int, int> local_rank(int index) const;
  /// Name of a generation's world.
  std::string run_id(uint32_t generation) const;
  /// Wakes the processes that wait for a change, after it was written.
  void notify_change();

 private:
  void map(size_t bytes);

  int fd_ = -1;
  BoardHead* head_ = nullptr;
  size_t bytes_ = 0;
};

/// This process's slot of the board.
class Member {
 public:
  using Clock = std::chrono::steady_clock;

  /// Nullptr unless `tandem launch` has started this process with a board. Throws InvalidArgument
  /// for a variable that does not name one.
  static Member* of_environment();
  /// Text of the variable for a slot.
  static std::string describe(const Board& board, int slot);

  enum class Joined : uint8_t { yes, ended, late };
  /// Waits for a generation after the joined one in which this process has a rank, and takes it:
  /// sets the launch's environment variables and this thread's progress words. `ended`: none will
  /// follow. `late`: none has begun by `until`; a process without a rank in it waits for longer.
  /// Not concurrent with threads that read or write the environment.
  Joined join(Clock::time_point until);
  /// Whether the world of the joined generation has ended: a later one has begun, or a lost rank
  /// cannot be replaced.
  bool is_outdated() const;
  /// Whether no rank's work is needed any more.
  bool is_complete() const { return board_.head().closed == kClosedComplete; }
  /// Whether the joined generation goes on with the output of one before.
  bool resumes() const { return resumes_; }

  bool has_rank() const { return board_.slot(slot_).rank >= 0; }
  /// Data-parallel ranks of the generation; 0: not known yet.
  int dp() const { return board_.head().dp; }
  /// Fewest data-parallel ranks that the run may continue with; 0: it never has fewer.
  int min_dp() const { return board_.head().min_dp; }
  /// States the layout, once; those of later generations follow from it.
  void note_layout(int tp, int dp, int pp, int ep) const;
  std::atomic<double>& rank_flops() const { return board_.head().rank_flops; }
  void note_output() const { board_.head().has_output = 1; }
  /// Before each step, and after the last one: `step` are finished.
  void note_step(int64_t step) const;
  void note_done() const { board_.slot(slot_).done = 1; }
  /// Asks the launcher to end this process and to replace it. Returns only if it does not within
  /// 10 s.
  void leave(ProcessFault fault) const;

 private:
  Member(int fd, int slot);

  Board board_;
  const int slot_;
  uint32_t joined_ = 0;
  bool resumes_ = false;
};

}  // namespace tandem::control
