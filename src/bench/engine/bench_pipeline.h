// Step time of a pipeline schedule, for `tandem bench pipeline`: the runner of training
// (engine/parallel/pipeline.h) on CPU thread ranks with its links, and passes that sleep for a
// given time in place of a model's. Measures what the runner and its links add to the simulated
// schedule, and what an emulated link adds to a step.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "bench/bench.h"
#include "schedule/pipeline.h"
#include "schedule/pipeline_simulation.h"

namespace tandem {

struct PipelineBench {
  schedule::PipelineShape shape;
  /// Seconds of a stage's passes, and of a message on the emulated link; transfer 0: no link.
  schedule::PassCosts costs{4e-3, 4e-3, 4e-3, 0};
  int repeats = 3;  ///< steps, after one that is not timed
};

/// Times of a step, and those that the simulator (schedule/pipeline_simulation.h) has for it.
struct PipelineStepTimes {
  BenchTimes step;
  double simulated_us = 0;
};

/// Share of a step's time.
constexpr double kMaxBubbleDifference = 0.05;

struct PipelineBenchResult {
  double busy_us = 0;  ///< passes of one rank
  PipelineStepTimes unlinked;
  /// With transfer > 0: the step with the emulated link, and steps of twice the microbatches with
  /// and without it.
  std::optional<PipelineStepTimes> linked, twice_linked, twice_unlinked;
  std::vector<Receipt> receipts = {};  ///< of rank 0's operators; passes that sleep have none

  /// Idle share of all ranks' time in the fastest step.
  double bubble() const { return 1 - busy_us / unlinked.step.min_us; }
  double simulated_bubble() const { return 1 - busy_us / unlinked.simulated_us; }
  /// Whether the two differ by at most `kMaxBubbleDifference`.
  bool ok() const;
  /// Share of the step with link that it takes longer than the one without; with link only.
  double exposed() const;
  double simulated_exposed() const;
  /// Exposed shares in steady state: of the time that further microbatches take.
  double steady_exposed() const;
  double simulated_steady_exposed() const;
};

/// Throws ConfigError unless the schedule exists for the shape, InvalidArgument unless passes take
/// longer than 0, and Error if a pass received another message than the schedule's.
PipelineBenchResult run_pipeline_bench(const PipelineBench& request);

}  // namespace tandem
