#include "kernels/elementwise.h"

#include <fmt/format.h>

#include "core/host_copy.h"
#include "kernels/cpu/kernels.h"
#include "kernels/cuda/kernels.h"
#include "tandem/error.h"

namespace tandem {

void add(const Exec& exec, const Tensor& x, const Tensor& y, const Tensor& out) {
  if (exec.on_gpu()) return gpu::add(exec.stream, x, y, out);
  cpu::add(x, y, out);
}

void sum(const Exec& exec, std::span<const Tensor> terms, const Tensor& out) {
  if (terms.empty()) throw InvalidArgument("sum: 0 terms: expected at least 1");
  if (exec.on_gpu() && terms.size() > kMaxGpuSumTerms) {
    throw InvalidArgument(
        fmt::format("sum: {} terms on a GPU: expected at most {}", terms.size(), kMaxGpuSumTerms));
  }
  for (const Tensor& term : terms) {
    if (term.dtype() == out.dtype() && term.dims() == 1 && term.elements() == out.elements())
      continue;
    throw InvalidArgument(fmt::format("sum: term {}: expected {} [{}]", term.describe(),
                                      name_of(out.dtype()), out.elements()));
  }
  if (out.elements() == 0) return;
  if (exec.on_gpu()) return gpu::sum(exec.stream, terms, out);
  cpu::sum(terms, out);
}

void cast(const Exec& exec, const Tensor& from, const Tensor& to) {
  if (exec.on_gpu()) return gpu::cast(exec.stream, from, to);
  cpu::cast(from, to);
}

std::vector<float> read_f32(const Exec& exec, const Tensor& values) {
  std::vector<float> read(size_t(values.elements()));
  const Memory memory(read.size() * sizeof(float), exec.device);
  const Tensor in_f32 = memory.view(DType::f32, {values.elements()});
  cast(exec, Tensor(values.data(), values.dtype(), {values.elements()}, values.device()), in_f32);
  copy(exec, in_f32, host_tensor(read));
  return read;
}

}  // namespace tandem
