// Decoupled momentum (DeMo, arXiv 2411.19870, algorithm 1): each learner adds its gradients, times
// the learning rate, to a momentum, sends the momentum's largest cosines and subtracts what it has
// sent:
//
//   w *= 1 - lr x decay,  m = beta x m + lr x g
//   q = the largest |DCT(m)| of each tile,  m -= inverse DCT(q)
//   w -= lr x sign(inverse DCT(mean of the q of the learners that sent one))
//
// The transform is linear and orthonormal, so the momentum is stored as its cosines: one transform
// of the gradients a step, and one back. Tiles are those of whole matrices (kernels/dct.h), and
// each is on one rank: tensor parallelism divides matrices between tiles, owners have whole rows of
// them. A cosine is stored where its tile has the element with its indices, so that momenta are the
// same at every layout of a learner. Norms and routers are sent whole.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "engine/model/parameter.h"
#include "engine/optim/optimizer.h"
#include "engine/parallel/sharded/sharded_state.h"
#include "engine/parallel/sync/exchange.h"

namespace tandem {

/// Homes of the momentum's cosines, and of the gradients times the learning rate.
constexpr Moment kDemoUnsent = Moment::first, kDemoGradients = Moment::second;

/// Decays the weights and sets kDemoGradients; the exchange does the rest.
extern const Optimizer kDemoOptimizer;

/// Messages about slices that together are whole tiles of a parameter, one row of tiles or several.
/// Throws InvalidArgument for others.
std::unique_ptr<Exchange> make_demo_exchange(const SyncConfig& config, const Exec& exec);

/// Rows of tiles, of at most `side`, of the local shards of all parameters but norms and routers:
/// ranges of the flat array, ascending. Shards are whole tiles in contiguous rows.
std::vector<FlatRange> tile_rows(std::span<const Parameter> list, int side);

}  // namespace tandem
