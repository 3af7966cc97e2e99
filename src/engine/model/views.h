// Activations, and views of the two fused activations of a branch.
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

/// Output of the column-parallel GEMM, [tokens, in.rows]: q | k | v | gate | up | shared gate.
struct HiddenViews {
  Tensor q, k, v, gate, up;
  Tensor qkv;          ///< q, k and v
  Tensor shared_gate;  ///< [tokens, 1]
};
HiddenViews split_hidden(const ModelLayout& layout, const BranchLayout& branch, const Tensor& t);

/// q and k before the norms of their heads, [tokens, q | k]; without dimensions if `t` has none.
struct UnnormalizedViews {
  Tensor q, k;
};
UnnormalizedViews split_unnormalized(const ModelLayout& layout, const Tensor& t);

/// Input of the row-parallel GEMM, [tokens, out.columns]: attention | MLP.
struct InnerViews {
  Tensor attention, mlp;
};
InnerViews split_inner(const ModelLayout& layout, const BranchLayout& branch, const Tensor& t);

}  // namespace tandem
