// All-reduce kernels that continue with AddNorm in the same launch. A block takes whole rows.
//
// one_shot: every rank sums and normalizes all rows. two_shot: rank r adds rows [r, r + 1) x shard
// and the residual, and sends hidden rows; every rank normalizes all of them, which moves half the
// bytes of also sending normalized rows.
#pragma once

#include <cuda_runtime_api.h>

#include "collectives/cuda/all_reduce.h"
#include "collectives/cuda/exchange.h"
#include "tandem/norm.h"

namespace tandem::gpu {

/// Rows that a rank sums in two_shot.
constexpr int64_t shard_rows(int64_t rows, int ranks) {
  return (rows + ranks - 1) / ranks;
}

/// `params.in`: this rank's contribution, with the size of `out`; `params.out` is not used.
void launch_all_reduce_norm(AllReduceAlgorithm algorithm, const ExchangeParams& params,
                            const AddNorm& add_norm, const Tensor& out, cudaStream_t stream);

}  // namespace tandem::gpu
