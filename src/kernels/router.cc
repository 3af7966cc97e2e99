#include "kernels/router.h"

#include "kernels/cpu/kernels.h"
#include "kernels/cuda/router.h"

namespace tandem {

void route_forward(const Exec& exec, const Tensor& logits, const Tensor& bias,
                   const RouterOptions& options, const Tensor& scores, const Tensor& experts,
                   const Tensor& weights, const Tensor& tokens) {
  if (exec.on_gpu()) {
    return gpu::route_forward(exec.stream, logits, bias, options, scores, experts, weights, tokens);
  }
  cpu::route_forward(logits, bias, options, scores, experts, weights, tokens);
}

void route_backward(const Exec& exec, const Tensor& scores, const Tensor& experts,
                    const Tensor& dweights, const Tensor& balance, const RouterOptions& options,
                    const Tensor& dlogits) {
  if (exec.on_gpu()) {
    return gpu::route_backward(exec.stream, scores, experts, dweights, balance, options, dlogits);
  }
  cpu::route_backward(scores, experts, dweights, balance, options, dlogits);
}

void add_router_load(const Exec& exec, const Tensor& scores, const Tensor& chosen,
                     const Tensor& load) {
  if (exec.on_gpu()) return gpu::add_router_load(exec.stream, scores, chosen, load);
  cpu::add_router_load(scores, chosen, load);
}

void add_loads(const Exec& exec, const Tensor& from, const Tensor& to) {
  if (exec.on_gpu()) return gpu::add_loads(exec.stream, from, to);
  cpu::add_loads(from, to);
}

void balance_gradient(const Exec& exec, const AuxLoss& loss, const Tensor& load,
                      const Tensor& balance) {
  if (exec.on_gpu()) return gpu::balance_gradient(exec.stream, loss, load, balance);
  cpu::balance_gradient(loss, load, balance);
}

void add_aux_losses(const Exec& exec, const AuxLoss& loss, const Tensor& loads,
                    const Tensor& total) {
  if (exec.on_gpu()) return gpu::add_aux_losses(exec.stream, loss, loads, total);
  cpu::add_aux_losses(loss, loads, total);
}

void adjust_router_bias(const Exec& exec, const Tensor& load, float rate, const Tensor& bias) {
  if (exec.on_gpu()) return gpu::adjust_router_bias(exec.stream, load, rate, bias);
  cpu::adjust_router_bias(load, rate, bias);
}

}  // namespace tandem
