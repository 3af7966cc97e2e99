// GEMM of few rows: bound by the bytes of its weight, as in decode.
#pragma once

#include <cstdint>

#include "tandem/tensor.h"

struct CUstream_st;  // CUDA's: cudaStream_t points to it

namespace tandem::gpu {

constexpr int64_t kMaxGemmRows = 16;

/// Whether `rows_gemm` takes that product: bf16 a [m, k] and weight [n, k], contiguous, out [m, n]
/// bf16 or f32; m at most kMaxGemmRows, k a multiple of 64.
bool is_rows_gemm(const Tensor& a, const Tensor& weight, const Tensor& out);

/// out = a x weight^T. A row has the same bits however many other rows there are. `early`: reads of
/// the weight may begin before the preceding kernel of the stream, which does not write it, has
/// ended (core/cuda/early_start.cuh).
void rows_gemm(CUstream_st* stream, const Tensor& a, const Tensor& weight, const Tensor& out,
               bool early = false);

}  // namespace tandem::gpu
