// Trainings that take their steps in turns, so that what a busy machine does to one it does to the
// other: of two, step by step, first the one, then the other, then the other way round. One trains
// while the others sleep.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <vector>

namespace tandem {

class Turns {
 public:
  /// Of `runs` trainings of `ranks` ranks each.
  Turns(int runs, int ranks);
  /// Every rank of every training calls this before each step, counted from 0, from a thread of its
  /// own; returns when it is that training's turn.
  void before_step(int run, int64_t step);
  /// Returns once all ranks of `run` wait for their first turn, or it has left.
  void await_ready(int run);
  /// The training has ended: its turns are passed over.
  void leave(int run);

 private:
  int64_t turn_of(int run, int64_t step) const;
  void pass_on();

  const int runs_, ranks_;
  std::mutex mutex_;
  std::condition_variable changed_;
  int64_t turn_ = 0;
  std::vector<int64_t> arrivals_;  ///< of each training's ranks, in all
  std::vector<bool> left_;
};

}  // namespace tandem
