// Rows of floats as e4m3 codes with a scale each; the CPU's bits (codec/quantize.h).
#pragma once

#include <cuda_runtime_api.h>

#include "tandem/tensor.h"

namespace tandem::gpu {

/// All contiguous and 16-byte aligned, columns a multiple of 16.
void launch_quantize_rows(const Tensor& x, const Tensor& codes, const Tensor& scales,
                          cudaStream_t stream);

}  // namespace tandem::gpu
