// Matrices without gaps. oneDNN uses its fast kernels for these only; its fallbacks round
// differently depending on the number of rows. With dense operands every row of a GEMM has the same
// bits however the rows are split.
#pragma once

#include "tandem/tensor.h"

namespace tandem {

/// True for a 2-D matrix without gaps, row-major or column-major.
bool is_dense(const Tensor& matrix);
/// True if each row is contiguous (a single column or row counts).
bool is_row_major(const Tensor& matrix);

/// Returns `matrix` if it is dense, else a dense copy in `memory` (grown as needed).
Tensor dense_copy(const Tensor& matrix, Memory& memory);
/// Row-major matrix of the same shape in `memory`; holds the values of `matrix` if `keep`.
Tensor row_major_copy(const Tensor& matrix, Memory& memory, bool keep);
/// Copies element by element; same shape and dtype.
void copy_matrix(const Tensor& from, const Tensor& to);

}  // namespace tandem
