// Fallback GEMM for shapes that cuBLASLt has no algorithm for, as on a rank's few SMs: any size and
// layout, without tensor cores. Slow; never chosen if the library has an algorithm.
#pragma once

#include <cuda_runtime_api.h>

#include "gemm/cuda/gemm_lt.h"

namespace tandem::gpu {

/// True if the kernel supports the dtypes: all but e4m3.
bool simple_gemm_takes(const GemmShape& shape);

/// Arguments as LtGemm::run. Sums in f32, in the order of K: bitwise equal on every run.
void launch_simple_gemm(const GemmShape& shape, const void* x, const void* weight, void* out,
                        const void* bias, cudaStream_t stream);

}  // namespace tandem::gpu
