// Kernels of kernels/outer_step.h on a stream of a GPU.
#pragma once

#include "kernels/outer_step.h"

struct CUstream_st;  // CUDA's: cudaStream_t points to it

namespace tandem::gpu {

void subtract(CUstream_st* stream, const Tensor& x, const Tensor& y, const Tensor& difference);
void divide(CUstream_st* stream, const Tensor& values, float divisor);
void outer_step(CUstream_st* stream, const OuterConstants& step, const Tensor& mean,
                const OuterState& state);

}  // namespace tandem::gpu
