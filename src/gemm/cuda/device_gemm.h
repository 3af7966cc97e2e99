// GEMM of tensors on a GPU (gemm/gemm.h), through cuBLASLt.
#pragma once

#include "gemm/gemm.h"

namespace tandem::gpu {

/// Throws InvalidArgument for a bias and for operands that are not contiguous.
void gemm(CUstream_st* stream, const Tensor& a, const Tensor& b, const Tensor& out,
          const GemmOptions& options);
bool gemm_swiglu(CUstream_st* stream, const Tensor& a, const Tensor& weight, const Tensor& out);

}  // namespace tandem::gpu
