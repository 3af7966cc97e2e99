// Outgoing emulated link of one rank: a copy engine with its own thread. Transfers occupy the link
// one after another, bytes / bandwidth each; a transfer's signal rises `latency` after its last
// byte was sent. The schedule is fixed when a transfer is queued, so delays do not accumulate. The
// bytes are copied as early as possible, which is not observable before the signal. Transfers to a
// peer whose connection is slow (comm/link_fault.h) take longer from there on, in a lane of their
// own.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>

#include "comm/threads/futex_waiter.h"
#include "core/system/process/fork.h"
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
  int peer;  ///< rank of the world
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
  struct Lane {
    std::deque<Queued> queue;  // sorted by due time; the first `ready` are copied
    size_t ready = 0;
    Clock::time_point last_due{};
  };

  void run(const std::stop_token& stop);
  /// Performs one step that is possible now; false if there is none.
  bool advance();
  void copy_chunk(Lane& lane);
  void deliver(Lane& lane);
  void sleep(const std::stop_token& stop);
  Clock::duration occupancy(double bytes) const;

  const EmulatedLink model_;
  mutable std::mutex mutex_;
  std::array<Lane, 2> lanes_;  // the second one of a slow connection
  Clock::time_point free_at_{};
  uint64_t started_ = 0;
  std::atomic<uint64_t> copied_{0}, delivered_{0};
  std::atomic<uint32_t> arrivals_{0};
  std::atomic<bool> asleep_{false};
  const ProcessMark process_;
  std::jthread thread_;
};

}  // namespace tandem::threads
