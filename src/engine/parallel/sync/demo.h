// Decoupled momentum (DeMo, arXiv 2411.19870, algorithm 1): each learner adds its gradients, times
// the learning rate, to a momentum, sends the momentum's largest cosines and subtracts what it has
// sent:
//
//   w *= 1 - lr x decay,  m = beta x m + lr x g
//   q = the largest |DCT(m)| of each tile,  m -= inverse DCT(q)
//   w -= lr x sign(inverse DCT(mean of the q of the learners that sent one))
//
// The transform is linear and orthonormal, so the momentum is stored as its cosines: one transform
// of the gradients a step, and one back. Tiles are those of whole matrices (kernels/dct.h), the
// momentum of a rank's slices their tiles in order. Norms and routers are sent whole.
#pragma once

#include <memory>

#include "engine/optim/optimizer.h"
#include "engine/parallel/sharded/sharded_state.h"
#include "engine/parallel/sync/exchange.h"

namespace tandem {

/// Homes of the momentum's cosines, and of the gradients times the learning rate.
constexpr Moment kDemoUnsent = Moment::first, kDemoGradients = Moment::second;

/// Decays the weights and sets kDemoGradients; the exchange does the rest.
extern const Optimizer kDemoOptimizer;

/// Messages about slices that are whole parameters. Throws InvalidArgument for a part of one.
std::unique_ptr<Exchange> make_demo_exchange(const SyncConfig& config, const Exec& exec);

}  // namespace tandem
