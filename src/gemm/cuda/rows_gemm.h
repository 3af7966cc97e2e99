// GEMM of few rows: bound by the bytes of its weight, as in decode.
#pragma once

#include <cstdint>

#include "tandem/tensor.h"

struct CUstream_st;  // CUDA's: cudaStream_t points to it

namespace tandem::gpu {

constexpr int64_t kMaxGemmRows = 16;

/// Whether `rows_gemm` takes that product: bf16 a [m, k] and weight [n, k], contiguous, both at
/// multiples of 16 bytes, out [m, n] bf16 or f32; m at most kMaxGemmRows, k a multiple of 64.
bool is_rows_gemm(const Tensor& a, const Tensor& weight, const Tensor& out);

struct RowsGemmOptions {
  bool accumulate = false;  ///< out += instead of out =
  /// Reads of the weight may begin before the preceding kernels of the stream, which do not write
  /// it, have ended (core/cuda/early_start.cuh).
  bool early = false;
};

/// out = a x weight^T. A row has the same bits however many other rows there are.
void rows_gemm(CUstream_st* stream, const Tensor& a, const Tensor& weight, const Tensor& out,
               const RowsGemmOptions& options = {});

/// out[m, f] = silu(a x gate^T) * (a x up^T), where weight is [gate | up], [2 f, k], and out bf16:
/// the bits of rows_gemm in bf16 and swiglu_forward (kernels/swiglu.h). The weight is read early.
void rows_gemm_swiglu(CUstream_st* stream, const Tensor& a, const Tensor& weight,
                      const Tensor& out);

}  // namespace tandem::gpu
