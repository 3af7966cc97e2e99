// Kernels of kernels/outer_step.h on a stream of a GPU.
#pragma once

#include "kernels/outer_step.h"

struct CUstream_st;  // CUDA's: cudaStream_t points to it

namespace tandem::gpu {

void subtract(CUstream_st* stream, const Tensor& x, const Tensor& y, const Tensor& difference);
void divide(CUstream_st* stream, const Tensor& values, float divisor);
void scale(CUstream_st* stream, const Tensor& values, float factor, const Tensor& scaled);
void outer_step(CUstream_st* stream, const OuterConstants& step, const Tensor& mean,
                const OuterState& state);
void take_signs(CUstream_st* stream, const Tensor& values);
void step_along(CUstream_st* stream, const Tensor& direction, float rate, const Tensor& weights);

}  // namespace tandem::gpu
