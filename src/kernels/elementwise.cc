#include "kernels/elementwise.h"

#include "kernels/cpu/kernels.h"
#include "kernels/cuda/kernels.h"

namespace tandem {

void add(const Exec& exec, const Tensor& x, const Tensor& y, const Tensor& out) {
  if (exec.on_gpu()) return gpu::add(exec.stream, x, y, out);
  cpu::add(x, y, out);
}

void cast(const Exec& exec, const Tensor& from, const Tensor& to) {
  if (exec.on_gpu()) return gpu::cast(exec.stream, from, to);
  cpu::cast(from, to);
}

}  // namespace tandem
