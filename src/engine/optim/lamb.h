// LAMB (You et al., arXiv 1904.00962, algorithm 2): each tensor's AdamW direction, with its decay,
// is scaled by the trust ratio |w| / |direction| of the whole tensor. The norms of shards are
// summed between the two phases of a step (engine/parallel/sharded/trust_ratios.h), which are in
// kernels/optimizer.h.
#pragma once

#include "engine/optim/adamw.h"

namespace tandem {

/// |w| / |direction| from their squares; 1 if one of them is 0.
double trust_ratio(double weight_squares, double direction_squares);

}  // namespace tandem
