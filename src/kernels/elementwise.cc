#include "kernels/elementwise.h"

#include <fmt/format.h>

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
    if (term.dtype() == DType::f32 && term.dims() == 1 && term.elements() == out.elements())
      continue;
    throw InvalidArgument(
        fmt::format("sum: term {}: expected f32 [{}]", term.describe(), out.elements()));
  }
  if (out.elements() == 0) return;
  if (exec.on_gpu()) return gpu::sum(exec.stream, terms, out);
  cpu::sum(terms, out);
}

void cast(const Exec& exec, const Tensor& from, const Tensor& to) {
  if (exec.on_gpu()) return gpu::cast(exec.stream, from, to);
  cpu::cast(from, to);
}

}  // namespace tandem
