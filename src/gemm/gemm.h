// Matrix product on one rank's CPU threads: oneDNN's, and without AVX-512 one of ours for f32.
#pragma once

#include "tandem/tensor.h"

namespace tandem {

struct GemmOptions {
  const Tensor* bias = nullptr;  ///< [N], dtype of out
  bool accumulate = false;       ///< out += instead of out =
};

/// out[M, N] = a[M, K] x b[K, N]. Strides express transposition: a weight stored [N, K] is passed
/// as `w.transposed()`. Each operand has one unit stride. a and b share a dtype (f32 or bf16);
/// out is f32 or that dtype; accumulation is f32. Zero-sized dimensions are valid (K = 0 gives 0 or
/// the bias). A row of the result has the same bits however many other rows are computed with it,
/// and on every run. Throws InvalidArgument naming the operand whose shape, stride or dtype is
/// wrong.
void gemm(const Tensor& a, const Tensor& b, const Tensor& out, const GemmOptions& options = {});

/// A row of a product has the same bits however many rows are computed with it. Not so where
/// neither oneDNN finds AVX-512 nor this build may use AVX2 (gemm/cpu/ordered_gemm.h).
bool rows_keep_bits();

/// Threads that this thread's kernels use from now on (ranks as threads share the machine): 1 where
/// it has lost its team (core/fork.h).
void set_kernel_threads(int threads);
int kernel_threads();

}  // namespace tandem
