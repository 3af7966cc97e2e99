#include "engine/train/turns.h"

namespace tandem {

Turns::Turns(int runs, int ranks)
    : runs_(runs), ranks_(ranks), arrivals_(size_t(runs)), left_(size_t(runs)) {}

int64_t Turns::turn_of(int run, int64_t step) const {
  return step * runs_ + (step % 2 == 0 ? run : runs_ - 1 - run);
}

/// A turn ends when all ranks of its training have arrived for the next step.
void Turns::pass_on() {
  const auto over = [&] {
    const int64_t step = turn_ / runs_, at = turn_ % runs_;
    const auto run = size_t(step % 2 == 0 ? at : runs_ - 1 - at);
    return left_[run] || arrivals_[run] >= (step + 2) * ranks_;
  };
  const auto any_left_to_run = [&] {
    for (const bool left : left_) {
      if (!left) return true;
    }
    return false;
  };
  while (any_left_to_run() && over()) ++turn_;
  changed_.notify_all();
}

void Turns::before_step(int run, int64_t step) {
  std::unique_lock lock(mutex_);
  ++arrivals_[size_t(run)];
  pass_on();
  changed_.wait(lock, [&] { return turn_ >= turn_of(run, step) || left_[size_t(run)]; });
}

void Turns::await_ready(int run) {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return arrivals_[size_t(run)] >= ranks_ || left_[size_t(run)]; });
}

void Turns::leave(int run) {
  const std::lock_guard lock(mutex_);
  left_[size_t(run)] = true;
  pass_on();
}

}  // namespace tandem
