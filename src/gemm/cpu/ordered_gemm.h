// f32 GEMM without AVX-512. oneDNN picks its kernel there by the number of rows, so a row's bits
// would depend on the other rows. This one adds every element over k in order, whatever the shape.
// A single row times a transposed b is slower than in oneDNN, which adds along k in parallel.
#pragma once

#include "gemm/gemm.h"

namespace tandem::cpu {

/// True if this build was compiled for AVX2 and oneDNN finds no AVX-512.
bool has_ordered_products();

/// Arguments as for `gemm`: f32, none empty, without gaps, out row-major.
void ordered_gemm(const Tensor& a, const Tensor& b, const Tensor& out, const GemmOptions& options);

}  // namespace tandem::cpu
