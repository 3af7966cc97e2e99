// Where one rank of one communicator sleeps. A waiter publishes the signal it wants, looks at it
// once more and sleeps; who raises a signal rings only when it is the wanted one. Both sides store
// before they load, sequentially consistent, so one of them sees the other.
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

struct alignas(64) Bell {
  std::atomic<uint32_t> rings{0};
  std::atomic<const SignalWord*> wanted{nullptr};

  void ring() {
    rings.fetch_add(1);
    futex_wake_all(rings);
  }
};

/// Raises `word` to `epoch` and wakes the rank behind `bell` if it waits for it. Everything written
/// before is visible to who reads the new value.
inline void raise_signal(SignalWord& word, uint64_t epoch, Bell& bell) {
  if (epoch <= word.load(std::memory_order_relaxed)) return;
  word.store(epoch);
  if (bell.wanted.load() == &word) bell.ring();
}

}  // namespace tandem
