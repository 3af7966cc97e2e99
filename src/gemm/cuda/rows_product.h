// GEMM of few rows on Hopper GPUs (rows_product.cuh), launched by rows_gemm.
#pragma once

#include <cuda_runtime_api.h>

#include "gemm/gemm.h"

namespace tandem::gpu {

/// Operands as of rows_gemm, or of rows_gemm_swiglu.
struct RowsProductArgs {
  const Tensor &a, &weight, &out;
  bool accumulate = false, early = false, swiglu = false;
};

/// Whether this thread's GPU has these kernels.
bool has_rows_product();

/// m at most kMaxFewRows, k a positive multiple of 64; with `swiglu` out is bf16.
void launch_rows_product(cudaStream_t stream, const RowsProductArgs& args);

}  // namespace tandem::gpu
