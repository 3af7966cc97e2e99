// Futex waiter in shared memory: lets a process wake another (or itself) without polling. A rank
// that changes something others may wait for (a signal, an abort) makes the change first and rings
// after; a waiter announces itself, checks, and only then sleeps, so no ring is lost.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

#include "comm/wait_check.h"

namespace tandem::processes {

/// Raises `signal` to `epoch`. A signal only grows and has one writer, so load and store suffice.
inline void raise_signal(uint64_t& signal, uint64_t epoch) {
  std::atomic_ref word(signal);
  if (word.load(std::memory_order_relaxed) < epoch) word.store(epoch, std::memory_order_release);
}

class FutexWaiter {
 public:
  using Clock = std::chrono::steady_clock;

  /// Cheap without a waiter: one fence and one load.
  void ring() {
    std::atomic_thread_fence(std::memory_order_seq_cst);
    if (waiters_.load(std::memory_order_relaxed) != 0) wake();
  }

  /// True once `ready()`, false at `deadline`. Spins `spins` times before it sleeps. `checked`:
  /// throws what a wait check throws.
  template <class Ready>
  bool wait(Ready ready, Clock::time_point deadline, int spins, bool checked = false) {
    for (int i = 0; i < spins; ++i) {
      if (ready()) return true;
      relax();
    }
    const Waiter announced(waiters_);
    std::atomic_thread_fence(std::memory_order_seq_cst);  // pairs with the one in ring()
    while (true) {
      const uint32_t before = rings_.load(std::memory_order_seq_cst);
      if (ready()) return true;
      if (Clock::now() >= deadline) return false;
      sleep(before, checked ? next_wait_check(deadline) : deadline);
      if (checked) check_wait();
    }
  }

 private:
  struct Waiter {
    std::atomic<uint32_t>& count;
    explicit Waiter(std::atomic<uint32_t>& count_) : count(count_) {
      count.fetch_add(1, std::memory_order_seq_cst);
    }
    ~Waiter() { count.fetch_sub(1, std::memory_order_seq_cst); }
  };
  static void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
  }
  void wake();
  void sleep(uint32_t before, Clock::time_point deadline);

  std::atomic<uint32_t> rings_{0}, waiters_{0};
};

}  // namespace tandem::processes
