// Exchange of the largest changes of each 4096, with error feedback (SparseLoCo, arXiv 2508.15706,
// algorithm 1).
#pragma once

#include <memory>

#include "codec/topk.h"
#include "engine/parallel/sync/exchange.h"

namespace tandem {

/// Adjacent slices that are sharded are one sparse message, whose chunks count from the first; all
/// others are sent in f32. `beta`: decay of what was not sent.
std::unique_ptr<Exchange> make_sparse_exchange(const codec::TopK& topk, double beta,
                                               const Exec& exec);

}  // namespace tandem
