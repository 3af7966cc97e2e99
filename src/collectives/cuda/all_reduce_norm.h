// The all-reduce kernels that go on to AddNorm in the same launch. A block takes whole rows.
//
// one_shot: every rank sums all rows and norms them. two_shot: rank r adds rows [r, r + 1) x part
// with the residual and sends hidden rows; every rank norms all of them, which moves half the bytes
// of sending normed rows as well.
#pragma once

#include <cuda_runtime_api.h>

#include "collectives/cuda/all_reduce.h"
#include "collectives/cuda/exchange.h"
#include "tandem/norm.h"

namespace tandem::gpu {

/// Rows that a rank adds up when two_shot.
constexpr int64_t part_rows(int64_t rows, int ranks) {
  return (rows + ranks - 1) / ranks;
}

/// `job.in`: this rank's part of the sum, as large as `out`; `job.out` is not used.
void launch_all_reduce_norm(AllReduceWay way, const ExchangeJob& job, const AddNorm& add_norm,
                            const Tensor& out, cudaStream_t stream);

}  // namespace tandem::gpu
