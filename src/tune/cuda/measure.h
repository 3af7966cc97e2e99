// Times of alternatives as a caller on the slowest rank sees them. In each round every alternative
// runs once, in a random order that is equal on all ranks. Before each: the L2 cache is flushed,
// the GPU idles for `idle` times the alternative's duration (which keeps the clock up and hides the
// host's enqueueing), and a device barrier aligns the ranks.
//
// The host cost of a call is measured twice: after that idle gap, in which the thread has slept and
// its core has slowed down, and, if a burst is requested, for back-to-back calls, as the layers of
// a model make them.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "comm/device/gpu_communicator.h"
#include "tune/candidate.h"

namespace tandem::gpu {

struct Timing {
  double median_us = 0, min_us = 0, max_us = 0;
  double host_us = 0;        ///< median time of enqueueing after the idle time, slowest rank
  double host_burst_us = 0;  ///< same for calls of a burst but the first; 0 without a burst
  std::vector<double> rounds_us;
};

struct MeasureOptions {
  int repeats = 20;
  double idle = 2.5;
  uint64_t seed = 1;
  int burst = 0;  ///< calls in a row, after the rounds, of which only enqueueing is timed
};

class Stopwatch {
 public:
  /// Collective.
  explicit Stopwatch(GpuCommunicator& comm);
  /// Collective: one Timing per candidate, each of which enqueues on the communicator's stream;
  /// equal on every rank.
  std::vector<Timing> measure(const std::vector<BoundCandidate>& alternatives,
                              const MeasureOptions& options = {});
  /// Collective: microseconds of one run on this rank, with the given idle time before it; *host_us
  /// is the time of enqueueing.
  double time_once(const std::function<void()>& run, double idle_us, double* host_us = nullptr);
  /// Collective: time this rank took to enqueue each run of a burst but the first, while the GPU
  /// was busy with other work.
  std::vector<double> time_burst(const std::function<void()>& run, int calls);
  /// Collective: enqueues the device barrier.
  void align();

 private:
  GpuCommunicator& comm_;
  std::shared_ptr<GpuBuffer> signals_;
  DeviceMemory epoch_, flush_;
  Event begin_{Event::Kind::timing}, end_{Event::Kind::timing};
};

}  // namespace tandem::gpu
