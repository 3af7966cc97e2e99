// One rank's weights: the f32 master array in host memory, used by optimizers and checkpoints; on a
// GPU rank, its copy there; and, for bf16, the working copy read by the GEMMs.
#pragma once

#include <span>

#include "core/exec.h"
#include "engine/model/layout.h"
#include "tandem/tensor.h"

namespace tandem {

class Weights {
 public:
  Weights(const Exec& exec, const ModelLayout& layout, DType dtype);
  std::span<float> values() { return {reinterpret_cast<float*>(master_.data()), size_t(size_)}; }
  /// Matrix in the working dtype; like the following, on the rank's device.
  Tensor matrix(const WeightMatrix& m) const;
  /// Matrix in f32, regardless of the working dtype.
  Tensor master(const WeightMatrix& m) const {
    return f32().view(DType::f32, {m.rows, m.columns}, size_t(m.offset) * sizeof(float));
  }
  /// `count` elements in f32 from `offset` in the flat array: a norm's gains or a router's bias.
  Tensor vector(int64_t offset, int64_t count) const {
    return f32().view(DType::f32, {count}, size_t(offset) * sizeof(float));
  }
  /// Updates the copies after the master array changed.
  void refresh();

 private:
  const Memory& f32() const { return exec_.on_gpu() ? on_gpu_ : master_; }

  Exec exec_;
  int64_t size_;
  DType dtype_;
  Memory master_, on_gpu_, working_;
};

}  // namespace tandem
