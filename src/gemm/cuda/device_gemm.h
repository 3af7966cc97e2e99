// GEMM of tensors on a GPU (gemm/gemm.h), through cuBLASLt.
#pragma once

#include "gemm/gemm.h"
#include "gemm/quantized_gemm.h"

namespace tandem::gpu {

/// Throws InvalidArgument for a bias and for operands that are not contiguous.
void gemm(CUstream_st* stream, const Tensor& a, const Tensor& b, const Tensor& out,
          const GemmOptions& options);
void gemm(CUstream_st* stream, const QuantizedRows& a, const QuantizedRows& b, const Tensor& out,
          bool accumulate);
bool gemm_swiglu(CUstream_st* stream, const Tensor& a, const Tensor& weight, const Tensor& out,
                 SameBits same_bits);

}  // namespace tandem::gpu
