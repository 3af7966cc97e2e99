#include "kernels/norm.h"

#include "kernels/cpu/kernels.h"
#include "kernels/cuda/kernels.h"
#include "kernels/elementwise.h"
#include "tandem/error.h"

namespace tandem {

const Tensor& NormWeight::on_gpu() const {
  if (offset != 0) throw Unsupported("norm with an offset of its weights: expected CPU ranks");
  return values;
}

void rms_norm_forward(const Exec& exec, const Tensor& x, const NormWeight& weight, double eps,
                      const Tensor& out, const Tensor& inverse_rms) {
  if (!weight.has_norm()) return cast(exec, x, out);
  if (exec.on_gpu()) {
    return gpu::rms_norm_forward(exec.stream, x, weight.on_gpu(), eps, out, inverse_rms);
  }
  cpu::rms_norm_forward(x, weight, eps, out, inverse_rms);
}

void add_rms_norm_forward(const Exec& exec, const Tensor& x, const Tensor& branch,
                          const NormWeight& weight, double eps, const Tensor& y, const Tensor& out,
                          const Tensor& inverse_rms) {
  if (exec.on_gpu() && weight.has_norm()) {
    return gpu::add_rms_norm_forward(exec.stream, x, branch, weight.on_gpu(), eps, y, out,
                                     inverse_rms);
  }
  add(exec, x, branch, y);
  rms_norm_forward(exec, y, weight, eps, out, inverse_rms);
}

void rms_norm(const Exec& exec, const Tensor& x, const Tensor& weight, double eps,
              const Tensor& out) {
  if (exec.on_gpu()) return gpu::rms_norm(exec.stream, x, weight, eps, out);
  cpu::rms_norm(x, weight, eps, out);
}

int64_t rms_norm_partial_sums(const Exec& exec, int64_t rows, int64_t hidden) {
  return exec.on_gpu() ? gpu::rms_norm_partial_sums(rows, hidden) : 0;
}

void rms_norm_backward(const Exec& exec, const Tensor& x, const NormWeight& weight,
                       const Tensor& inverse_rms, const Tensor& dout, const Tensor& dx,
                       const Tensor& dweight, const Tensor& partial_sums, const Tensor& dx_bf16) {
  if (exec.on_gpu()) {
    if (!weight.has_norm()) throw Unsupported("gradient without a norm: expected CPU ranks");
    return gpu::rms_norm_backward(exec.stream, x, weight.on_gpu(), inverse_rms, dout, dx, dweight,
                                  partial_sums, dx_bf16);
  }
  cpu::rms_norm_backward(x, weight, inverse_rms, dout, dx, dweight, dx_bf16);
}

}  // namespace tandem
