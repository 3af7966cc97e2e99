// LAMB (You et al., arXiv 1904.00962, algorithm 2): each tensor's AdamW direction, with its decay,
// is scaled by the trust ratio |w| / |direction| of the whole tensor. The norms of shards are
// summed between the two phases of a step (engine/parallel/sharded/trust_ratios.h).
#pragma once

#include "engine/optim/adamw.h"

namespace tandem {

/// First phase: updates both moments and replaces `gradient` by the direction
/// m^ / (sqrt(v^) + eps) + weight_decay * w, the last term only if `decay`. All f32, contiguous and
/// of one size.
void lamb_direction(const Exec& exec, const AdamStep& step, bool decay, const AdamState& state,
                    const Tensor& gradient);

/// |w| / |direction| from their squares; 1 if one of them is 0.
double trust_ratio(double weight_squares, double direction_squares);

/// Second phase: w -= rate * direction. `working`: as adamw's.
void lamb_update(const Exec& exec, float rate, const Tensor& w, const Tensor& direction,
                 const Tensor& working = {});

}  // namespace tandem
