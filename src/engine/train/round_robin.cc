#include "engine/train/round_robin.h"

namespace tandem {

RoundRobin::RoundRobin(int runs, int ranks)
    : runs_(runs), ranks_(ranks), arrivals_(size_t(runs)), left_(size_t(runs)) {}

int64_t RoundRobin::slot(int run, int64_t step) const {
  return step * runs_ + (step % 2 == 0 ? run : runs_ - 1 - run);
}

/// A turn ends when all ranks of its training have arrived for the next step.
void RoundRobin::advance() {
  const auto over = [&] {
    const int64_t step = slot_ / runs_, at = slot_ % runs_;
    const auto run = size_t(step % 2 == 0 ? at : runs_ - 1 - at);
    return left_[run] || arrivals_[run] >= (step + 2) * ranks_;
  };
  const auto any_left_to_run = [&] {
    for (const bool left : left_) {
      if (!left) return true;
    }
    return false;
  };
  while (any_left_to_run() && over()) ++slot_;
  changed_.notify_all();
}

void RoundRobin::before_step(int run, int64_t step) {
  std::unique_lock lock(mutex_);
  ++arrivals_[size_t(run)];
  advance();
  changed_.wait(lock, [&] { return slot_ >= slot(run, step) || left_[size_t(run)]; });
}

void RoundRobin::await_ready(int run) {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return arrivals_[size_t(run)] >= ranks_ || left_[size_t(run)]; });
}

void RoundRobin::leave(int run) {
  const std::lock_guard lock(mutex_);
  left_[size_t(run)] = true;
  advance();
}

}  // namespace tandem
