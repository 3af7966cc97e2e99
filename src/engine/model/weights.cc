#include "engine/model/weights.h"

#include "kernels/elementwise.h"
#include "tandem/error.h"

namespace tandem {

Weights::Weights(const Exec& exec, const ModelLayout& layout, DType dtype)
    : exec_(exec), size_(layout.size), dtype_(dtype), master_(size_t(layout.size) * sizeof(float)) {
  if (dtype != DType::f32 && dtype != DType::bf16) {
    throw InvalidArgument("model dtype " + std::string(name_of(dtype)) + ": expected f32 or bf16");
  }
  if (exec.on_gpu()) on_gpu_ = Memory(master_.bytes(), exec.device);
  if (dtype != DType::f32) working_ = Memory(size_t(size_) * size_of(dtype), exec.device);
}

Tensor Weights::matrix(const WeightMatrix& m) const {
  const Memory& memory = dtype_ == DType::f32 ? f32() : working_;
  return memory.view(dtype_, {m.rows, m.columns}, size_t(m.offset) * size_of(dtype_));
}

void Weights::refresh() {
  const Tensor all = f32().view(DType::f32, {size_});
  if (exec_.on_gpu()) copy(exec_, master_.view(DType::f32, {size_}), all);
  if (dtype_ != DType::f32) cast(exec_, all, working_.view(dtype_, {size_}));
}

}  // namespace tandem
