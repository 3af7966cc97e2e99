// Toy kernel on the hand-written GEMM's main loop, with its own source and sink. Shows that a new
// kernel needs no change to the main loop, and tests it without ranks.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "tandem/dtype.h"

namespace tandem::test {

/// out = relu(rows of x · weightᵀ): row i of `out` [m, n] is computed from row (i + 128 * tiles) %
/// m of x [m, k]; `weight` is [n, k]. bf16 or f16. m is a multiple of 128, n and k are multiples of
/// 8, and k is at least 256. Blocks until done.
void rotated_gemm(DType dtype, const void* x, const void* weight, void* out, int64_t m, int64_t n,
                  int64_t k, int tiles, cudaStream_t stream);

}  // namespace tandem::test
