// Seeded operands, made on the device from the counter-based generator that the CPU uses too.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "tandem/tensor.h"

namespace tandem::gpu {

enum class Values {
  any,
  positive,  ///< sums only grow: what accumulators cut off of them adds up
};

/// Element i of `tensor` (contiguous; f32, bf16, f16 or e4m3) = value(seed, stream, first + i),
/// uniform in [-1, 1), or its magnitude.
void fill_uniform(const Tensor& tensor, uint64_t seed, uint64_t stream, int64_t first,
                  cudaStream_t on, Values values = Values::any);
/// The same of standard normal values (Box-Muller), f32, bf16 or f16. Not the CPU's bits.
void fill_normal(const Tensor& tensor, uint64_t seed, uint64_t stream, int64_t first,
                 cudaStream_t on);
/// The same, f32, uniform in [1/4, 5/4).
void fill_scales(const Tensor& tensor, uint64_t seed, uint64_t stream, int64_t first,
                 cudaStream_t on);
/// Every byte 0xff: NaN in all float types.
void poison(const Tensor& tensor, cudaStream_t on);

}  // namespace tandem::gpu
