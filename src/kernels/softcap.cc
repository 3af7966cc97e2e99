#include "kernels/softcap.h"

#include "kernels/cpu/kernels.h"
#include "tandem/error.h"

namespace tandem {

void softcap_forward(const Exec& exec, const Tensor& x, double cap) {
  if (exec.on_gpu()) throw Unsupported("softcap_forward: expected CPU ranks");
  cpu::softcap_forward(x, float(cap));
}

void softcap_backward(const Exec& exec, const Tensor& capped, double cap, const Tensor& dx) {
  if (exec.on_gpu()) throw Unsupported("softcap_backward: expected CPU ranks");
  cpu::softcap_backward(capped, float(cap), dx);
}

}  // namespace tandem
