#include "gemm/cpu/dense.h"

#include <cstring>

namespace tandem {
namespace {

template <typename T>
void copy_elements(const Tensor& from, const Tensor& to) {
  for (int64_t i = 0; i < to.dim(0); ++i) {
    const T* source = from.as<T>() + i * from.stride(0);
    T* target = to.as<T>() + i * to.stride(0);
    for (int64_t j = 0; j < to.dim(1); ++j) target[j * to.stride(1)] = source[j * from.stride(1)];
  }
}

Tensor reserve(Memory& memory, DType dtype, int64_t rows, int64_t columns) {
  const size_t bytes = size_t(rows * columns) * size_of(dtype);
  if (memory.bytes() < bytes) memory = Memory(bytes);
  return memory.view(dtype, {rows, columns});
}

}  // namespace

bool is_row_major(const Tensor& t) {
  return t.dim(1) == 1 || t.stride(1) == 1;
}

bool is_dense(const Tensor& t) {
  const int64_t rows = t.dim(0), columns = t.dim(1);
  const bool by_rows = (columns == 1 || t.stride(1) == 1) && (rows == 1 || t.stride(0) == columns);
  const bool by_columns = (rows == 1 || t.stride(0) == 1) && (columns == 1 || t.stride(1) == rows);
  return by_rows || by_columns;
}

void copy_matrix(const Tensor& from, const Tensor& to) {
  if (from.stride(1) == 1 && to.stride(1) == 1) {
    const size_t row_bytes = size_t(to.dim(1)) * size_of(to.dtype());
    for (int64_t i = 0; i < to.dim(0); ++i) {
      std::memcpy(to.rows(i, 1).data(), from.rows(i, 1).data(), row_bytes);
    }
  } else if (size_of(to.dtype()) == 4) {
    copy_elements<uint32_t>(from, to);
  } else {
    copy_elements<uint16_t>(from, to);
  }
}

Tensor dense_copy(const Tensor& matrix, Memory& memory) {
  if (is_dense(matrix)) return matrix;
  if (!is_row_major(matrix)) return dense_copy(matrix.transposed(), memory).transposed();
  const Tensor copy = reserve(memory, matrix.dtype(), matrix.dim(0), matrix.dim(1));
  copy_matrix(matrix, copy);
  return copy;
}

Tensor row_major_copy(const Tensor& matrix, Memory& memory, bool keep) {
  const Tensor copy = reserve(memory, matrix.dtype(), matrix.dim(0), matrix.dim(1));
  if (keep) copy_matrix(matrix, copy);
  return copy;
}

}  // namespace tandem
