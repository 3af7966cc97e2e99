// Futex waiter of one rank of one communicator. A waiter publishes the signal it wants, checks it
// once more and sleeps; raising a signal wakes the waiter only if it is the wanted one. Both sides
// store before they load, sequentially consistent, so one of them sees the other.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

namespace tandem {

using SignalWord = std::atomic<uint64_t>;

/// Sleeps while `word` == `seen`, until woken or `deadline`. May return early.
void futex_wait(const std::atomic<uint32_t>& word, uint32_t seen,
                std::chrono::steady_clock::time_point deadline);
void futex_wake_all(const std::atomic<uint32_t>& word);

struct alignas(64) FutexWaiter {
  std::atomic<uint32_t> rings{0};
  std::atomic<const SignalWord*> wanted{nullptr};

  void ring() {
    rings.fetch_add(1);
    futex_wake_all(rings);
  }
};

/// Raises `word` to `epoch` and wakes the rank of `waiter` if it waits for it. Everything written
/// before is visible to a reader of the new value.
inline void raise_signal(SignalWord& word, uint64_t epoch, FutexWaiter& waiter) {
  if (epoch <= word.load(std::memory_order_relaxed)) return;
  word.store(epoch);
  if (waiter.wanted.load() == &word) waiter.ring();
}

}  // namespace tandem
