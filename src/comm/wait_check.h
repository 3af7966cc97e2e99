// Hook of long waits that set_wait_check installs.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>

namespace tandem {

inline std::atomic<void (*)()> wait_check{nullptr};

/// Time at which a sleep must end: `deadline`, or 100 ms from now if a check is installed.
inline std::chrono::steady_clock::time_point next_wait_check(
    std::chrono::steady_clock::time_point deadline) {
  if (!wait_check.load(std::memory_order_relaxed)) return deadline;
  return std::min(deadline, std::chrono::steady_clock::now() + std::chrono::milliseconds(100));
}

/// Called after each sleep. Throws what the check throws.
inline void check_wait() {
  if (const auto check = wait_check.load(std::memory_order_relaxed)) check();
}

}  // namespace tandem
