// One rank's weights: the f32 master array used by optimizers and checkpoints, and, for bf16, the
// working copy read by the GEMMs.
#pragma once

#include <span>

#include "engine/model/layout.h"
#include "tandem/tensor.h"

namespace tandem {

class Weights {
 public:
  Weights(const ModelLayout& layout, DType dtype);
  std::span<float> values() { return {reinterpret_cast<float*>(master_.data()), size_t(size_)}; }
  /// Matrix in the working dtype.
  Tensor matrix(const WeightMatrix& m) const;
  /// Matrix in f32, regardless of the working dtype.
  Tensor master(const WeightMatrix& m) const {
    return master_.view(DType::f32, {m.rows, m.columns}, size_t(m.offset) * sizeof(float));
  }
  std::span<const float> norm(int64_t offset, int64_t hidden) const {
    return {reinterpret_cast<const float*>(master_.data()) + offset, size_t(hidden)};
  }
  /// Updates the working copy after the master array changed.
  void refresh();

 private:
  int64_t size_;
  DType dtype_;
  Buffer master_, working_;
};

}  // namespace tandem
