// Seeded operands, generated on the device by the counter-based generator of the CPU.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "tandem/tensor.h"

namespace tandem::gpu {

enum class Values {
  any,
  positive,  ///< sums only grow, so truncation in accumulators adds up
};

/// Element i of `tensor` (contiguous; f32, bf16, f16 or e4m3) = value(seed, stream, first + i),
/// uniform in [-1, 1), or its magnitude.
void fill_uniform(const Tensor& tensor, uint64_t seed, uint64_t stream, int64_t first,
                  cudaStream_t on, Values values = Values::any);
/// Standard normal values (Box-Muller), f32, bf16 or f16. Not the CPU's bits.
void fill_normal(const Tensor& tensor, uint64_t seed, uint64_t stream, int64_t first,
                 cudaStream_t on);
/// f32 values, uniform in [1/4, 5/4).
void fill_scales(const Tensor& tensor, uint64_t seed, uint64_t stream, int64_t first,
                 cudaStream_t on);
/// Sets every byte to 0xff: NaN in all float types.
void poison(const Tensor& tensor, cudaStream_t on);

}  // namespace tandem::gpu
