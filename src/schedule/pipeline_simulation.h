// Execution of a pipeline schedule on ideal ranks: every rank runs its list in order, each pass as
// soon as the passes it needs have ended. Forward of stage s needs forward of s-1; backward and
// backward_input of s need forward of s and backward or backward_input of s+1; backward_weight
// needs backward_input of its own stage. Sends do not wait for their receivers.
#pragma once

#include <vector>

#include "schedule/pipeline.h"

namespace tandem::schedule {

/// Duration of the passes of a stage, in any unit; backward takes both of its halves.
struct PassCosts {
  double forward = 1, backward_input = 1, backward_weight = 1;
  double transfer = 0;  ///< between stages of two ranks, concurrent with passes
  /// Activations that backward or backward_input computes again first, of all layers of the stage.
  double recompute = 0;

  double of(PassKind pass) const;
};

struct PassTime {
  double begin = 0, end = 0;
};

struct PipelineTimes {
  /// Times of each rank's actions in order. A rank that would wait forever has fewer than actions.
  std::vector<std::vector<PassTime>> passes;
  std::vector<int> peak_activations;  ///< of each rank
  double makespan = 0;                ///< from 0 to the end of the last pass
  /// Idle share of all ranks' time in [0, makespan]: (p-1)/(m+p-1) for 1F1B.
  double bubble = 0;
  /// Idle share of a rank's time from its first to its last pass, of the rank with the most: the
  /// bubble if ranks need not begin together, as in the papers on zero bubbles.
  double inner_bubble = 0;
};

/// `actions`: of every rank, with chunks and microbatches of the shape, each pass once.
PipelineTimes simulate(const PipelineShape& shape,
                       const std::vector<std::vector<PipelineAction>>& actions,
                       const PassCosts& costs = {});

/// Idle time of a rank by the schedule's source, without transfers, F, B and W being the costs, B
/// with recomputation:
///   gpipe, 1f1b, interleaved  (p-1) (F+B+W)
///   zb-h1                     (p-1) (F+B-W)      from p microbatches on, if F and B >= W
///   zb-v                      (p-1) F            from 2p-1 microbatches on, if F = B = W; all of
///   it
///                                                before a rank's first pass or after its last one
///   dualpipe-v                (p-1) (F+2B-W)     if passes side by side run one after the other
/// The simulated dualpipe-v has less, (p-1) (F+B-W) if F >= B >= W: the output of a forward pass
/// leaves before the backward pass at its side ends.
double published_bubble_time(const PipelineShape& shape, const PassCosts& costs);
/// Share of the total time, as PipelineTimes::bubble.
double published_bubble(const PipelineShape& shape, const PassCosts& costs = {});

}  // namespace tandem::schedule
