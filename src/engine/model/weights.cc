#include "engine/model/weights.h"

#include "kernels/elementwise.h"
#include "tandem/error.h"

namespace tandem {

Weights::Weights(const ModelLayout& layout, DType dtype)
    : size_(layout.size), dtype_(dtype), master_(size_t(layout.size) * sizeof(float)) {
  if (dtype != DType::f32 && dtype != DType::bf16) {
    throw InvalidArgument("model dtype " + std::string(name_of(dtype)) + ": expected f32 or bf16");
  }
  if (dtype != DType::f32) working_ = Buffer(size_t(size_) * size_of(dtype));
}

Tensor Weights::matrix(const WeightMatrix& m) const {
  const Buffer& buffer = dtype_ == DType::f32 ? master_ : working_;
  return buffer.view(dtype_, {m.rows, m.columns}, size_t(m.offset) * size_of(dtype_));
}

void Weights::refresh() {
  if (dtype_ != DType::f32) cast(master_.view(DType::f32, {size_}), working_.view(dtype_, {size_}));
}

}  // namespace tandem
