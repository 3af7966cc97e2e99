#include "comm/threads/link.h"

#include <sys/prctl.h>

#include <algorithm>
#include <cstring>

#include "observe/recorder.h"

namespace tandem::threads {
namespace {

using namespace std::chrono_literals;

// Copies are chunked so that a long one does not delay a signal that becomes due.
constexpr size_t kChunkBytes = size_t(128) << 10;

// Small enough that adding it many times does not overflow the clock.
constexpr std::chrono::seconds kForever{1'000'000'000};

// Sleeps in slices, so that an abort is noticed. False if the deadline passes first.
bool sleep_until(Link::Clock::time_point when, const std::atomic<bool>& stop,
                 Link::Clock::time_point deadline) {
  while (!stop.load()) {
    const auto now = Link::Clock::now();
    if (now >= when) return true;
    if (now >= deadline) return false;
    std::this_thread::sleep_until(std::min({when, deadline, now + 5ms}));
  }
  return true;
}

}  // namespace

Link::Link(const EmulatedLink& model)
    : model_(model), thread_([this](const std::stop_token& stop) { run(stop); }) {}

void Link::close() {
  if (!thread_.joinable()) return;
  if (!process_.is_this_process()) return thread_.detach();
  thread_.request_stop();
  arrivals_.fetch_add(1);
  futex_wake_all(arrivals_);
  thread_.join();
  const std::lock_guard lock(mutex_);
  queue_.clear();
  ready_ = 0;
  copied_ = delivered_ = started_;
}

Link::Clock::duration Link::occupancy(size_t bytes) const {
  const std::chrono::duration<double> taken(double(bytes) / model_.bytes_per_s);
  return taken < kForever ? std::chrono::duration_cast<Clock::duration>(taken) : kForever;
}

void Link::start(Transfer transfer) {
  const size_t bytes = transfer.bytes;
  const int peer = transfer.peer;
  Clock::time_point begin, left;
  {
    const std::lock_guard lock(mutex_);
    const auto now = Clock::now();
    begin = std::max(now, free_at_);
    left = std::min(begin + occupancy(bytes), now + kForever);
    free_at_ = left;
    last_due_ = left + std::chrono::duration_cast<Clock::duration>(
                           std::chrono::duration<double>(model_.latency_s));
    queue_.emplace_back(std::move(transfer)).due = last_due_;
    ++started_;
  }
  arrivals_.fetch_add(1);
  if (asleep_.load()) futex_wake_all(arrivals_);
  if (bytes) recorder().add({SpanKind::transfer, "put", begin, left, -1, peer});
}

void Link::settle() const {
  uint64_t target;
  {
    const std::lock_guard lock(mutex_);
    target = started_;
  }
  while (copied_.load(std::memory_order_acquire) < target) std::this_thread::sleep_for(20us);
}

bool Link::flush(const std::atomic<bool>& stop, Clock::time_point deadline) const {
  Clock::time_point left;
  {
    const std::lock_guard lock(mutex_);
    left = free_at_;
  }
  if (!sleep_until(left, stop, deadline)) return false;
  settle();
  return true;
}

bool Link::drain(const std::atomic<bool>& stop, Clock::time_point deadline) const {
  Clock::time_point due;
  uint64_t target;
  {
    const std::lock_guard lock(mutex_);
    due = last_due_;
    target = started_;
  }
  if (!sleep_until(due, stop, deadline)) return false;
  while (!stop.load() && delivered_.load() < target) {
    if (Clock::now() >= deadline + 1s) return false;
    std::this_thread::sleep_for(20us);
  }
  settle();
  return true;
}

void Link::run(const std::stop_token& stop) {
  prctl(PR_SET_TIMERSLACK, 1);  // the default makes a sleep up to 50 us too long
  while (!stop.stop_requested()) {
    if (!advance()) sleep(stop);
  }
}

bool Link::advance() {
  Queued* due = nullptr;
  Queued* next = nullptr;
  {
    const std::lock_guard lock(mutex_);
    if (ready_ > 0 && queue_.front().due <= Clock::now()) {
      due = &queue_.front();
    } else if (ready_ < queue_.size()) {
      next = &queue_[ready_];
    }
  }
  // Only this thread removes elements, and appending moves none.
  if (due) {
    deliver(*due);
  } else if (next) {
    copy_chunk(*next);
  }
  return due || next;
}

void Link::copy_chunk(Queued& transfer) {
  const size_t bytes = std::min(kChunkBytes, transfer.bytes - transfer.copied);
  if (bytes) std::memcpy(transfer.to + transfer.copied, transfer.from + transfer.copied, bytes);
  transfer.copied += bytes;
  if (transfer.copied < transfer.bytes) return;
  {
    const std::lock_guard lock(mutex_);
    ++ready_;
  }
  copied_.fetch_add(1, std::memory_order_release);
}

void Link::deliver(const Queued& first) {
  raise_signal(*first.signal, first.epoch, *first.waiter);
  {
    const std::lock_guard lock(mutex_);
    queue_.pop_front();
    --ready_;
  }
  delivered_.fetch_add(1);
}

void Link::sleep(const std::stop_token& stop) {
  asleep_.store(true);
  const uint32_t seen = arrivals_.load();
  auto until = Clock::now() + 1s;
  bool work = stop.stop_requested();
  {
    const std::lock_guard lock(mutex_);
    work |= ready_ < queue_.size();
    if (ready_ > 0) until = std::min(until, queue_.front().due);
  }
  if (!work) futex_wait(arrivals_, seen, until);
  asleep_.store(false);
}

}  // namespace tandem::threads
