// Round-robin scheduling of concurrent trainings, so that machine load affects all equally. Two
// trainings run step by step in the order A B, B A, and so on; one trains while the others sleep.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <vector>

namespace tandem {

class RoundRobin {
 public:
  /// Schedules `runs` trainings of `ranks` ranks each.
  RoundRobin(int runs, int ranks);
  /// Called by every rank of every training before each step, counted from 0, from its own thread;
  /// returns when it is that training's turn.
  void before_step(int run, int64_t step);
  /// Returns once all ranks of `run` wait for their first turn, or the run has left.
  void await_ready(int run);
  /// Marks the training as ended: its turns are skipped.
  void leave(int run);

 private:
  int64_t slot(int run, int64_t step) const;
  void advance();

  const int runs_, ranks_;
  std::mutex mutex_;
  std::condition_variable changed_;
  int64_t slot_ = 0;
  std::vector<int64_t> arrivals_;  ///< arrivals per training, summed over its ranks
  std::vector<bool> left_;
};

}  // namespace tandem
