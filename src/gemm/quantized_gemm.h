// GEMM of e4m3 rows with a scale each (codec/quantize.h), of one rank.
#pragma once

#include "codec/quantize.h"

namespace tandem {

/// out[M, N] = a x b^T or, with `accumulate`, added to it: f32 or bf16, contiguous; a e4m3 [M, K]
/// and b e4m3 [N, K] with their scales. CPUs multiply the values in f32. On a GPU N and K are
/// multiples of 16, all operands are at a multiple of 16 bytes, and the first call with a shape
/// times cuBLASLt's algorithms: the same bits on every later run of the process. Throws
/// InvalidArgument.
void gemm(const Exec& exec, const QuantizedRows& a, const QuantizedRows& b, const Tensor& out,
          bool accumulate);

/// Dtype in which operators over ranks (tandem/overlap.h) take quantized rows on exec's device:
/// e4m3 on GPUs, f32 on CPUs, where they are given the values.
DType quantized_operand_dtype(const Exec& exec);

}  // namespace tandem
