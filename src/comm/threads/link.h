// Outgoing emulated link of one rank: a copy engine with its own thread. Transfers occupy the link
// one after another, bytes / bandwidth each; a transfer's signal rises `latency` after its last
// byte was sent. The schedule is fixed when a transfer is queued, so delays do not accumulate. The
// bytes are copied as early as possible, which is not observable before the signal.
#pragma once

#include <atomic>
#include <chrono>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>

#include "comm/threads/futex_waiter.h"
#include "core/fork.h"
#include "tandem/communicator.h"

namespace tandem::threads {

struct Transfer {
  std::shared_ptr<const void> keep[2];  ///< owners of the memory that the pointers below refer to
  std::byte* to;
  const std::byte* from;
  size_t bytes;
  SignalWord* signal;
  uint64_t epoch;
  FutexWaiter* waiter;
  int peer;
};

class Link {
 public:
  using Clock = std::chrono::steady_clock;

  explicit Link(const EmulatedLink& model);
  ~Link() { close(); }
  /// Ends the thread and drops pending transfers: nothing is copied after this call.
  void close();

  /// Queues `transfer` and adds its wire time to the calling thread's recorder.
  void start(Transfer transfer);
  /// Returns when no earlier transfer reads its source any more.
  void settle() const;
  /// Returns when the last byte of every earlier transfer has been sent, or `stop` is set; false if
  /// `deadline` passes first.
  bool flush(const std::atomic<bool>& stop, Clock::time_point deadline) const;
  /// Returns when every earlier transfer has arrived, or `stop` is set; false if `deadline` passes
  /// first.
  bool drain(const std::atomic<bool>& stop, Clock::time_point deadline) const;

 private:
  struct Queued : Transfer {
    explicit Queued(Transfer&& transfer) : Transfer(std::move(transfer)) {}
    size_t copied = 0;
    Clock::time_point due;
  };

  void run(const std::stop_token& stop);
  /// Performs one step that is possible now; false if there is none.
  bool advance();
  void copy_chunk(Queued& transfer);
  void deliver(const Queued& first);
  void sleep(const std::stop_token& stop);
  Clock::duration occupancy(size_t bytes) const;

  const EmulatedLink model_;
  mutable std::mutex mutex_;
  std::deque<Queued> queue_;  // sorted by due time; the first `ready_` are copied
  size_t ready_ = 0;
  Clock::time_point free_at_{}, last_due_{};
  uint64_t started_ = 0;
  std::atomic<uint64_t> copied_{0}, delivered_{0};
  std::atomic<uint32_t> arrivals_{0};
  std::atomic<bool> asleep_{false};
  const ProcessMark process_;
  std::jthread thread_;
};

}  // namespace tandem::threads
