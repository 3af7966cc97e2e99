#include "comm/threads/link.h"

#include <sys/prctl.h>

#include <algorithm>
#include <cstring>

#include "comm/flow_spans.h"
#include "comm/link_fault.h"

namespace tandem::threads {
namespace {

using namespace std::chrono_literals;

// Copies are chunked so that a long one does not delay a signal that becomes due.
constexpr size_t kChunkBytes = size_t(128) << 10;

// Small enough that adding it many times does not overflow the clock.
constexpr std::chrono::seconds kForever{1'000'000'000};

struct SlowConnection {
  int peer = -1;
  double factor = 1;
};
thread_local SlowConnection slow_connection;

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
  for (Lane& lane : lanes_) lane.queue.clear(), lane.ready = 0;
  copied_ = delivered_ = started_;
}

Link::Clock::duration Link::occupancy(double bytes) const {
  const std::chrono::duration<double> taken(bytes / model_.bytes_per_s);
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
    left = std::min(begin + occupancy(double(bytes)), now + kForever);
    free_at_ = left;
    const bool is_slow = peer == slow_connection.peer;
    const double factor = is_slow ? slow_connection.factor : 1;
    if (is_slow) left = std::min(begin + occupancy(double(bytes) * factor), now + kForever);
    const auto latency = std::chrono::duration_cast<Clock::duration>(
        std::chrono::duration<double>(std::min(model_.latency_s * factor, kForever.count() * 1.0)));
    Lane& lane = lanes_[is_slow];
    lane.last_due = std::max(lane.last_due, left + latency);
    lane.queue.emplace_back(std::move(transfer)).due = lane.last_due;
    ++started_;
  }
  arrivals_.fetch_add(1);
  if (asleep_.load()) futex_wake_all(arrivals_);
  if (bytes) ScopedSend::add_transfer(begin, left, peer);
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
    due = std::max(lanes_[0].last_due, lanes_[1].last_due);
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
  bool work = false;
  for (Lane& lane : lanes_) {
    bool is_due = false, is_left = false;
    {
      const std::lock_guard lock(mutex_);
      is_due = lane.ready > 0 && lane.queue.front().due <= Clock::now();
      is_left = lane.ready < lane.queue.size();
    }
    if (is_due) {
      deliver(lane);
    } else if (is_left) {
      copy_chunk(lane);
    }
    work |= is_due || is_left;
  }
  return work;
}

/// Only this thread removes elements, and appending moves none.
void Link::copy_chunk(Lane& lane) {
  Queued* next = nullptr;
  {
    const std::lock_guard lock(mutex_);
    next = &lane.queue[lane.ready];
  }
  Queued& transfer = *next;
  const size_t bytes = std::min(kChunkBytes, transfer.bytes - transfer.copied);
  if (bytes) std::memcpy(transfer.to + transfer.copied, transfer.from + transfer.copied, bytes);
  transfer.copied += bytes;
  if (transfer.copied < transfer.bytes) return;
  {
    const std::lock_guard lock(mutex_);
    ++lane.ready;
  }
  copied_.fetch_add(1, std::memory_order_release);
}

void Link::deliver(Lane& lane) {
  const Queued* first = nullptr;
  {
    const std::lock_guard lock(mutex_);
    first = &lane.queue.front();
  }
  raise_signal(*first->signal, first->epoch, *first->waiter);
  {
    const std::lock_guard lock(mutex_);
    lane.queue.pop_front();
    --lane.ready;
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
    for (const Lane& lane : lanes_) {
      work |= lane.ready < lane.queue.size();
      if (lane.ready > 0) until = std::min(until, lane.queue.front().due);
    }
  }
  if (!work) futex_wait(arrivals_, seen, until);
  asleep_.store(false);
}

}  // namespace tandem::threads

namespace tandem {

void slow_link(int peer, double factor) {
  threads::slow_connection = {peer, factor};
}

}  // namespace tandem
