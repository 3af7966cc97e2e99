// Sum of the ranks' partial sums by the owner.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "tandem/tensor.h"

namespace tandem::gpu {

constexpr int kMaxPartials = 16;

struct Partials {
  const void* of[kMaxPartials] = {};  ///< one per rank; 16-byte aligned
  int count = 0;
};

/// out[i] = sum over ranks, in rank order and f32, of partials.of[r][i], all of out's dtype. out
/// has a multiple of 16 bytes and may be one of the partial sums.
void launch_sum(const Partials& partials, const Tensor& out, cudaStream_t stream);

}  // namespace tandem::gpu
