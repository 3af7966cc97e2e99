#include "engine/model/weights.h"

#include "kernels/elementwise.h"
#include "tandem/error.h"

namespace tandem {

Weights::Weights(const Exec& exec, const ModelLayout& layout, DType dtype)
    : exec_(exec),
      size_(layout.size),
      dtype_(dtype),
      master_(size_t(layout.size) * sizeof(float), exec.device) {
  if (dtype != DType::f32 && dtype != DType::bf16) {
    throw InvalidArgument("model dtype " + std::string(name_of(dtype)) + ": expected f32 or bf16");
  }
  if (dtype != DType::f32) working_ = Memory(size_t(size_) * size_of(dtype), exec.device);
}

Tensor Weights::matrix(const WeightMatrix& m) const {
  const Memory& memory = dtype_ == DType::f32 ? master_ : working_;
  return memory.view(dtype_, {m.rows, m.columns}, size_t(m.offset) * size_of(dtype_));
}

void Weights::refresh(FlatRange range) {
  if (dtype_ == DType::f32 || range.count == 0) return;
  cast(exec_, values().narrow(0, range.begin, range.count),
       working_.view(dtype_, {range.count}, size_t(range.begin) * size_of(dtype_)));
}

}  // namespace tandem
