// GEMM of few rows: bound by the bytes of its weight, as in decode.
#pragma once

#include <cstdint>

#include "tandem/tensor.h"

struct CUstream_st;  // CUDA's: cudaStream_t points to it

namespace tandem::gpu {

/// Rows that `rows_gemm` takes on this thread's GPU: 64 on Hopper, 16 on others.
int64_t max_gemm_rows();

/// Whether `rows_gemm` takes that product: bf16 a [m, k] and weight [n, k], contiguous, both at
/// multiples of 16 bytes, out [m, n] bf16 or f32; m at most max_gemm_rows(), k a multiple of 64.
/// a's rows may be strided, as may out's.
bool is_rows_gemm(const Tensor& a, const Tensor& weight, const Tensor& out);

struct RowsGemmOptions {
  bool accumulate = false;  ///< out += instead of out =
  /// Reads of the weight may begin before the preceding kernels of the stream, which do not write
  /// it, have ended (core/cuda/early_start.cuh).
  bool early = false;
  /// A row has the same bits however many other rows there are. Without it, on Hopper, one or two
  /// rows may have others.
  bool same_bits = false;
};

/// out = a x weight^T. Bits depend on the weight's shape, and on whether other ranks share the GPU,
/// since k is split accordingly.
void rows_gemm(CUstream_st* stream, const Tensor& a, const Tensor& weight, const Tensor& out,
               const RowsGemmOptions& options = {});

/// out[m, f] = silu(a x gate^T) * (a x up^T), where weight is [gate | up], [2 f, k], and out bf16:
/// the bits of rows_gemm in bf16 and swiglu_forward (kernels/swiglu.h). The weight is read early.
void rows_gemm_swiglu(CUstream_st* stream, const Tensor& a, const Tensor& weight, const Tensor& out,
                      bool same_bits = false);

}  // namespace tandem::gpu
