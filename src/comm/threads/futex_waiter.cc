#include "comm/threads/futex_waiter.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <climits>
#include <ctime>

namespace tandem {

void futex_wait(const std::atomic<uint32_t>& word, uint32_t seen,
                std::chrono::steady_clock::time_point deadline) {
  const int64_t ns =
      std::chrono::duration_cast<std::chrono::nanoseconds>(deadline.time_since_epoch()).count();
  const timespec until{time_t(ns / 1'000'000'000), long(ns % 1'000'000'000)};
  syscall(SYS_futex, &word, FUTEX_WAIT_BITSET_PRIVATE, seen, &until, nullptr,
          FUTEX_BITSET_MATCH_ANY);
}

void futex_wake_all(const std::atomic<uint32_t>& word) {
  syscall(SYS_futex, &word, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
}

}  // namespace tandem
