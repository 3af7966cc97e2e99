// Row quantization to e4m3 codes with a scale per row; the CPU's bits (codec/quantize.h).
#pragma once

#include <cuda_runtime_api.h>

#include "tandem/tensor.h"

namespace tandem::gpu {

/// Operands contiguous and 16-byte aligned, columns a multiple of 16.
void launch_quantize_rows(const Tensor& x, const Tensor& codes, const Tensor& scales,
                          cudaStream_t stream);
/// Rows of the transpose of x, which is bf16; its rows are a multiple of 16, too.
void launch_quantize_columns(const Tensor& x, const Tensor& codes, const Tensor& scales,
                             cudaStream_t stream);

}  // namespace tandem::gpu
