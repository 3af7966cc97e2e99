// Detection of ranks that hang, from their progress words and what the system says of their
// processes.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <string>
#include <vector>

#include "comm/rendezvous/membership.h"

namespace tandem::control {

/// A process hangs if it
/// - is stopped (SIGSTOP) for 0.3 s, in work or in a wait;
/// - is in one operation of a step or validation for longer than 0.5 s and 10 times the longest one
///   that any rank has finished, and has computed for half of that: a process that is not given a
///   processor does not hang;
/// - the same without computing, for 10 s and 100 times;
/// - is in one operation, or waits for files, for the step time-out.
/// The second and third apply to operations that the process has finished before, in a whole step
/// of the same size or a whole validation (WorkScope): nothing is known of the time that others
/// take. One that waits for a peer or does not train yet only hangs if it is stopped. Checked at
/// intervals of at most 0.1 s.
class HangWatch {
 public:
  /// `step_timeout_s`: 0: none.
  HangWatch(const Board& board, double step_timeout_s);

  /// Reason why the slot's process hangs; empty: it does not.
  std::string check(int slot, pid_t pid);

 private:
  struct Seen {
    int64_t since_ns = -1;
    double processor_s = 0;   ///< used when that was first seen
    int64_t stopped_ns = -1;  ///< first seen stopped; -1: it is not
  };
  int64_t longest_work_ns() const;

  const Board& board_;
  const double step_timeout_s_;
  std::vector<Seen> seen_;
};

}  // namespace tandem::control
