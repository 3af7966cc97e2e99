// bf16 GEMM on AMX's tile registers, which oneDNN uses with bits that depend on the number of rows
// (gemm/cpu/tile_kernel.h).
#pragma once

#include "gemm/gemm.h"

namespace tandem::cpu {

/// True if oneDNN finds AMX, and so may this process use it.
bool has_tile_products();

/// Arguments as for `gemm`: a and b in bf16, none empty, without gaps, out row-major.
void tile_gemm(const Tensor& a, const Tensor& b, const Tensor& out, const GemmOptions& options);

}  // namespace tandem::cpu
