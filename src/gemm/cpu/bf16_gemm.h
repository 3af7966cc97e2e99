// bf16 products on processors without bf16 instructions, where oneDNN refuses them (below AVX-512)
// or emulates them: version 2 with bits that depend on how many rows a call has, version 3 in twice
// the time (3.7: 1.7 to 2.5 times). The operands are widened and multiplied in f32, which is exact
// for bf16 values, and the result is rounded once.
#pragma once

#include "gemm/gemm.h"

namespace tandem::cpu {

bool has_bf16_products();
/// With AMX, whose sums of bf16 products are added in another order than the vector units'.
bool has_tile_products();

using F32Product = void (*)(const Tensor& a, const Tensor& b, const Tensor& out,
                            const GemmOptions& options);
/// Arguments as for `gemm`, a and b in bf16. `multiply` is given f32 alone.
void widened_gemm(const Tensor& a, const Tensor& b, const Tensor& out, const GemmOptions& options,
                  F32Product multiply);

}  // namespace tandem::cpu
