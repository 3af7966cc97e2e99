#include "comm/processes/shared/futex_waiter.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <climits>

namespace tandem::processes {

static_assert(sizeof(std::atomic<uint32_t>) == 4 && std::atomic<uint32_t>::is_always_lock_free);

void FutexWaiter::wake() {
  rings_.fetch_add(1, std::memory_order_seq_cst);
  syscall(SYS_futex, &rings_, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

void FutexWaiter::sleep(uint32_t before, Clock::time_point deadline) {
  const auto left = std::chrono::duration_cast<std::chrono::nanoseconds>(deadline - Clock::now());
  if (left.count() <= 0) return;
  const timespec timeout{time_t(left.count() / 1000000000), long(left.count() % 1000000000)};
  syscall(SYS_futex, &rings_, FUTEX_WAIT, before, &timeout, nullptr, 0);
}

}  // namespace tandem::processes
