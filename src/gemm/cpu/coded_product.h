// Coded weights (gemm/coded_weight.h) on a CPU. Operands fit.
#pragma once

#include "gemm/coded_weight.h"

namespace tandem::cpu {

void quantize(const Tensor& weight, const CodedMatrix& to);
/// x and out: f32 or bf16.
void multiply(const CodedMatrix& weight, const Tensor& x, const Tensor& out,
              const CodedOptions& options);
/// to: f32.
void read(const CodedMatrix& weight, const Tensor& to);

}  // namespace tandem::cpu
