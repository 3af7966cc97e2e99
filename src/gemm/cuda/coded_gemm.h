// Coded weights (gemm/coded_weight.h) on a GPU; their products on Hopper only.
#pragma once

#include "gemm/coded_weight.h"

namespace tandem::gpu {

/// Shapes of a weight's codes (u8) and scales (f32, whatever they are) in memory: see
/// gemm/cuda/coded_layout.h.
struct CodedShape {
  int64_t code_columns, scale_rows, scale_columns;
};
CodedShape coded_shape(int64_t rows, int64_t columns);
/// Whether this thread's GPU multiplies coded weights.
bool has_coded_gemm();

void quantize(CUstream_st* stream, const Tensor& weight, const CodedMatrix& to);
/// to: f32 or bf16.
void read(CUstream_st* stream, const CodedMatrix& weight, const Tensor& to);

/// Whether coded_gemm takes x and out; out has as many columns as the weight rows, with SwiGLU
/// half.
bool is_coded_gemm(const CodedMatrix& weight, const Tensor& x, const Tensor& out);
struct CodedGemmOptions {
  bool accumulate = false, swiglu = false;
};
void coded_gemm(CUstream_st* stream, const CodedMatrix& weight, const Tensor& x, const Tensor& out,
                const CodedGemmOptions& options);

}  // namespace tandem::gpu
