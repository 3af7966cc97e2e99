#include "gemm/gemm.h"

#include "gemm/cuda/device_gemm.h"

namespace tandem {

void gemm(const Exec& exec, const Tensor& a, const Tensor& b, const Tensor& out,
          const GemmOptions& options) {
  if (exec.on_gpu()) return gpu::gemm(exec.stream, a, b, out, options);
  gemm(a, b, out, options);
}

bool gemm_swiglu(const Exec& exec, const Tensor& a, const Tensor& weight, const Tensor& out) {
  return exec.on_gpu() && gpu::gemm_swiglu(exec.stream, a, weight, out);
}

bool times_algorithms(const Exec& exec) {
  return exec.on_gpu();
}

}  // namespace tandem
