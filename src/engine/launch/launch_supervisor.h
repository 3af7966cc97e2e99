// Process above the launcher's, which starts it again if it is killed: a launcher's death ends its
// ranks, but the board that says how far they were, and the memory of their snapshots, are this
// process's, too.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <string>

namespace tandem {

/// Launcher that was killed.
struct LostLauncher {
  pid_t pid;
  std::string cause;  ///< "was ended by signal 9, Killed"
  std::chrono::steady_clock::time_point noticed;
  bool is_last = false;  ///< no further one trains: the next only saves snapshots in memory
};

/// Calls `launch` in a child process, with nullptr, and returns its exit status there. This process
/// passes signals on to it and returns with the child's status. If the child is killed, waits until
/// the ranks have ended with it and calls `launch` in another; not if it was asked to end, nor if
/// the reader of its output has ended. If several in a row are killed while `progress`, a number of
/// steps, does not grow, the next one is the last. No other thread may run.
int supervise(const std::function<int(const LostLauncher*)>& launch,
              const std::function<int64_t()>& progress);

}  // namespace tandem
