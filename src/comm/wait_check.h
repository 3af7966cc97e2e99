// What a wait that lasts owes to set_wait_check.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>

namespace tandem {

inline std::atomic<void (*)()> wait_check{nullptr};

/// How long a sleep may last.
inline std::chrono::steady_clock::time_point next_wait_check(
    std::chrono::steady_clock::time_point deadline) {
  if (!wait_check.load(std::memory_order_relaxed)) return deadline;
  return std::min(deadline, std::chrono::steady_clock::now() + std::chrono::milliseconds(100));
}

/// After each sleep. Throws what the check throws.
inline void check_wait() {
  if (const auto check = wait_check.load(std::memory_order_relaxed)) check();
}

}  // namespace tandem
