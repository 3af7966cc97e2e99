// Matrices without gaps. oneDNN's fast kernels take only those, and falls back to others, whose
// rounding depends on how many rows there are, for the rest; with dense operands every row of a
// product has the same bits however the rows are split.
#pragma once

#include "tandem/tensor.h"

namespace tandem {

/// Two dimensions, one line directly after the other, in either order.
bool is_dense(const Tensor& matrix);
/// Rows are lines (a single column or row counts as such).
bool is_row_major(const Tensor& matrix);

/// `matrix` itself if dense, else its lines copied to `memory` (grown as needed).
Tensor dense_copy(const Tensor& matrix, Buffer& memory);
/// Memory for a row-major matrix of the same shape; contents are those of `matrix` when `keep`.
Tensor row_major_copy(const Tensor& matrix, Buffer& memory, bool keep);
/// Element by element; same shape and dtype.
void copy_matrix(const Tensor& from, const Tensor& to);

}  // namespace tandem
