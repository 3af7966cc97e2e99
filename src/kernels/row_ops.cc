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
  if (exec.on_gpu()) return gpu::column_sums(exec.stream, rows, sums, accumulate);
  cpu::column_sums(rows, sums, accumulate);
}

void rms_norm_heads(const Exec& exec, const NormWeight& weight, double eps, const Tensor& rows,
                    const Tensor& unnormalized) {
  if (exec.on_gpu())
    return gpu::rms_norm_heads(exec.stream, weight.on_gpu(), eps, rows, unnormalized);
  cpu::rms_norm_heads(weight, eps, rows, unnormalized);
}

void rms_norm_heads_backward(const Exec& exec, const Tensor& unnormalized, const NormWeight& weight,
                             double eps, const Tensor& drows, const Tensor& dweight,
                             const Tensor& partial_sums) {
  if (exec.on_gpu()) {
    return gpu::rms_norm_heads_backward(exec.stream, unnormalized, weight.on_gpu(), eps, drows,
                                        dweight, partial_sums);
  }
  cpu::rms_norm_heads_backward(unnormalized, weight, eps, drows, dweight);
}

void gate_rows(const Exec& exec, const Tensor& gate, const Tensor& rows) {
  if (exec.on_gpu()) return gpu::gate_rows(exec.stream, gate, rows);
  cpu::gate_rows(gate, rows);
}

void gate_rows_backward(const Exec& exec, const Tensor& gate, const Tensor& gated,
                        const Tensor& drows, const Tensor& dgate) {
  if (exec.on_gpu()) return gpu::gate_rows_backward(exec.stream, gate, gated, drows, dgate);
  cpu::gate_rows_backward(gate, gated, drows, dgate);
}

void scale_rows(const Exec& exec, const Tensor& rows, double factor) {
  if (exec.on_gpu()) throw Unsupported("scale_rows: expected CPU ranks");
  cpu::scale_rows(rows, factor);
}

void permute_heads(const Exec& exec, const Tensor& rows, std::span<const int32_t> order) {
  if (exec.on_gpu()) throw Unsupported("permute_heads: expected CPU ranks");
  cpu::permute_heads(rows, order);
}

}  // namespace tandem
