// Residual add and RMSNorm after a sum that is already in memory: for algorithms without a fused
// kernel.
#pragma once

#include <cuda_runtime_api.h>

#include "tandem/norm.h"

namespace tandem::gpu {

/// AddNorm of `sum`, which has out's shape and dtype (f32, bf16 or f16) and may be out. All
/// contiguous and 16-byte aligned, rows multiples of 16 bytes. Throws InvalidArgument for another
/// dtype.
void launch_add_norm(const Tensor& sum, const AddNorm& add_norm, const Tensor& out,
                     cudaStream_t stream);

}  // namespace tandem::gpu
