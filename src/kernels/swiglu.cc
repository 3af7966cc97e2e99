#include "kernels/swiglu.h"

#include "kernels/cpu/kernels.h"
#include "kernels/cuda/kernels.h"
#include "tandem/error.h"

namespace tandem {

void swiglu_forward(const Exec& exec, const Tensor& gate, const Tensor& up, const Tensor& out) {
  if (exec.on_gpu()) return gpu::swiglu_forward(exec.stream, gate, up, out);
  cpu::swiglu_forward(gate, up, out);
}

void swiglu_backward(const Exec& exec, const Tensor& gate, const Tensor& up, const Tensor& dout,
                     const Tensor& dgate, const Tensor& dup) {
  if (exec.on_gpu()) return gpu::swiglu_backward(exec.stream, gate, up, dout, dgate, dup);
  cpu::swiglu_backward(gate, up, dout, dgate, dup);
}

void geglu_forward(const Exec& exec, const Tensor& gate, const Tensor& up, const Tensor& out) {
  if (exec.on_gpu()) throw Unsupported("geglu_forward: expected CPU ranks");
  cpu::geglu_forward(gate, up, out);
}

void geglu_backward(const Exec& exec, const Tensor& gate, const Tensor& up, const Tensor& dout,
                    const Tensor& dgate, const Tensor& dup) {
  if (exec.on_gpu()) throw Unsupported("geglu_backward: expected CPU ranks");
  cpu::geglu_backward(gate, up, dout, dgate, dup);
}

}  // namespace tandem
