// f32 products without AVX-512. oneDNN chooses its code there by the number of rows, so that a
// row's bits would depend on how many others are computed with it. Here every element is added up
// over k in order, whatever its neighbours. A single row times a transposed b is slower than
// oneDNN's, which adds along k in parallel.
#pragma once

#include "gemm/gemm.h"

namespace tandem::cpu {

/// Whether this build has it for this processor: compiled for AVX2, and oneDNN finds no AVX-512.
bool has_ordered_products();

/// Arguments as for `gemm`: f32, none empty, without gaps, out row-major.
void ordered_gemm(const Tensor& a, const Tensor& b, const Tensor& out, const GemmOptions& options);

}  // namespace tandem::cpu
