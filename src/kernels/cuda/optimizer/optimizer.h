// The optimizer's kernels on a stream of a GPU. Sums have a fixed order, so runs give equal bits.
#pragma once

#include "kernels/optimizer.h"

struct CUstream_st;  // CUDA's: cudaStream_t points to it

namespace tandem::gpu {

/// `shrink`: factor of w, for weight decay.
void adamw(CUstream_st* stream, const AdamConstants& step, float shrink, const AdamState& state,
           const Tensor& gradient, const Tensor& working);

/// Kernels of kernels/optimizer.h; `weight_decay` is 0 for tensors without decay.
void lamb_direction(CUstream_st* stream, const AdamConstants& step, float weight_decay,
                    const AdamState& state, const Tensor& gradient);
void lamb_update(CUstream_st* stream, float rate, const Tensor& w, const Tensor& direction,
                 const Tensor& working);

/// Memory of `sums` f64 sums, which come first, and of their scratch.
size_t square_sum_bytes(int sums);
/// sums[index] += sum of the squares of `values`, f32 or bf16.
void add_squares(CUstream_st* stream, const Tensor& values, const Memory& sums, int index);

}  // namespace tandem::gpu
