// bf16 GEMMs on processors without bf16 instructions, where oneDNN either rejects them (below
// AVX-512) or emulates them: version 2 with results that depend on the number of rows, version 3 in
// twice the time (3.7: 1.7 to 2.5 times). The operands are widened and multiplied in f32, which is
// exact for bf16 values; the result is rounded once.
#pragma once

#include "gemm/gemm.h"

namespace tandem::cpu {

bool has_bf16_products();

using F32Product = void (*)(const Tensor& a, const Tensor& b, const Tensor& out,
                            const GemmOptions& options);
/// Arguments as for `gemm`, with a and b in bf16. `multiply` only receives f32 tensors.
void widened_gemm(const Tensor& a, const Tensor& b, const Tensor& out, const GemmOptions& options,
                  F32Product multiply);

}  // namespace tandem::cpu
