#include "kernels/row_ops.h"

#include "kernels/cpu/kernels.h"
#include "kernels/cuda/kernels.h"
#include "tandem/error.h"

namespace tandem {

void add_bias(const Exec& exec, const Tensor& bias, const Tensor& rows) {
  if (exec.on_gpu()) return gpu::add_bias(exec.stream, bias, rows);
  cpu::add_bias(bias, rows);
}

void column_sums(const Exec& exec, const Tensor& rows, const Tensor& sums, bool accumulate) {
  if (exec.on_gpu()) throw Unsupported("column_sums: on a GPU: expected a CPU rank");
  cpu::column_sums(rows, sums, accumulate);
}

void rms_norm_heads(const Exec& exec, const Tensor& weight, double eps, const Tensor& rows,
                    const Tensor& unnormalized) {
  if (!exec.on_gpu()) return cpu::rms_norm_heads(weight, eps, rows, unnormalized);
  if (unnormalized.dims() > 0) {
    throw Unsupported("rms_norm_heads: unnormalized rows on a GPU: expected a CPU rank");
  }
  gpu::rms_norm_heads(exec.stream, weight, eps, rows);
}

void rms_norm_heads_backward(const Exec& exec, const Tensor& unnormalized, const Tensor& weight,
                             double eps, const Tensor& drows, const Tensor& dweight) {
  if (exec.on_gpu()) {
    throw Unsupported("rms_norm_heads_backward: on a GPU: expected a CPU rank");
  }
  cpu::rms_norm_heads_backward(unnormalized, weight, eps, drows, dweight);
}

void gate_rows(const Exec& exec, const Tensor& gate, const Tensor& rows) {
  if (exec.on_gpu()) return gpu::gate_rows(exec.stream, gate, rows);
  cpu::gate_rows(gate, rows);
}

void gate_rows_backward(const Exec& exec, const Tensor& gate, const Tensor& gated,
                        const Tensor& drows, const Tensor& dgate) {
  if (exec.on_gpu()) throw Unsupported("gate_rows_backward: on a GPU: expected a CPU rank");
  cpu::gate_rows_backward(gate, gated, drows, dgate);
}

}  // namespace tandem
