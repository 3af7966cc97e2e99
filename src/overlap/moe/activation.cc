#include "overlap/moe/activation.h"

#include "kernels/row_ops.h"
#include "kernels/swiglu.h"

namespace tandem {
namespace {

Tensor half(const Tensor& gate_up, int64_t index) {
  const int64_t ffn = gate_up.dim(1) / 2;
  return gate_up.narrow(1, index * ffn, ffn);
}

Tensor bias_of(const Tensor& biases, int expert) {
  const Tensor row = biases.rows(expert, 1);
  return Tensor(row.data(), DType::f32, {row.elements()}, row.device());
}

}  // namespace

void MoeActivation::forward(int expert, const Tensor& gate_up, const Tensor& out) const {
  if (bias.dims() > 0) add_bias(Exec{}, bias_of(bias, expert), gate_up);
  again(gate_up, out);
}

void MoeActivation::again(const Tensor& gate_up, const Tensor& out) const {
  const Tensor gate = half(gate_up, 0), up = half(gate_up, 1);
  clamp.limit > 0 ? clamped_swiglu_forward(clamp, gate, up, out)
                  : swiglu_forward(Exec{}, gate, up, out);
}

void MoeActivation::backward(const Tensor& gate_up, const Tensor& d_out,
                             const Tensor& d_gate_up) const {
  const Tensor gate = half(gate_up, 0), up = half(gate_up, 1), d_gate = half(d_gate_up, 0),
               d_up = half(d_gate_up, 1);
  clamp.limit > 0 ? clamped_swiglu_backward(clamp, gate, up, d_out, d_gate, d_up)
                  : swiglu_backward(Exec{}, gate, up, d_out, d_gate, d_up);
}

void MoeActivation::bias_backward(int expert, const Tensor& d_gate_up) const {
  if (bias.dims() > 0) column_sums(Exec{}, d_gate_up, bias_of(d_bias, expert), false);
}

}  // namespace tandem
