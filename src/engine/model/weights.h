// One rank's weights on its device: the f32 master array and, for bf16, the working copy that GEMMs
// read.
#pragma once

#include "core/exec.h"
#include "engine/model/layout.h"
#include "tandem/tensor.h"

namespace tandem {

class Weights {
 public:
  Weights(const Exec& exec, const ModelLayout& layout, DType dtype);
  /// The master array.
  Tensor values() const { return master_.view(DType::f32, {size_}); }
  /// Working copy, without data if the working dtype is f32.
  Tensor working() const {
    return dtype_ == DType::f32 ? Tensor() : working_.view(dtype_, {size_});
  }
  /// Matrix in the working dtype.
  Tensor matrix(const WeightMatrix& m) const;
  /// Matrix in f32, regardless of the working dtype.
  Tensor master(const WeightMatrix& m) const {
    return master_.view(DType::f32, {m.rows, m.columns}, size_t(m.offset) * sizeof(float));
  }
  /// `count` elements in f32 from `offset` in the flat array: a norm's gains or a router's bias.
  Tensor vector(int64_t offset, int64_t count) const {
    return master_.view(DType::f32, {count}, size_t(offset) * sizeof(float));
  }
  /// Updates the working copy after the range of the master array changed.
  void refresh(FlatRange range);
  void refresh() { refresh({0, size_}); }

 private:
  Exec exec_;
  int64_t size_;
  DType dtype_;
  Memory master_, working_;
};

}  // namespace tandem
