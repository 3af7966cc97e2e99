// Activations, and those of a branch by its values.
#pragma once

#include "engine/model/layout.h"
#include "tandem/tensor.h"

namespace tandem {

/// Columns [begin, begin + count) of a matrix.
inline Tensor columns(const Tensor& t, int64_t begin, int64_t count) {
  return t.narrow(1, begin, count);
}

/// Owned memory of one element type, [rows, columns], on a device.
class Activation {
 public:
  Activation(DType dtype, int64_t rows, int64_t columns, Device device = {})
      : memory_(size_t(rows * columns) * size_of(dtype), device),
        tensor_(memory_.view(dtype, {rows, columns})) {}
  operator const Tensor&() const { return tensor_; }
  const Tensor* operator->() const { return &tensor_; }
  const Tensor& operator*() const { return tensor_; }

 private:
  Memory memory_;
  Tensor tensor_;
};

namespace program {

/// Sets those that are columns of others.
void set_ranges(const BranchLayout& branch, Values& values);

}  // namespace program
}  // namespace tandem
