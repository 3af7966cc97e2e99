#include "kernels/attention/sinks.h"

#include "kernels/cpu/kernels.h"
#include "tandem/error.h"

namespace tandem {

void add_sinks(const Exec& exec, const Tensor& sinks, const Tensor& out, const Tensor& log_sums) {
  if (exec.on_gpu()) throw Unsupported("add_sinks: expected CPU ranks");
  cpu::add_sinks(sinks, out, log_sums);
}

void sinks_backward(const Exec& exec, const Tensor& sinks, const Tensor& out,
                    const Tensor& log_sums, const Tensor& dout, const Tensor& dsinks,
                    bool accumulate) {
  if (exec.on_gpu()) throw Unsupported("sinks_backward: expected CPU ranks");
  cpu::sinks_backward(sinks, out, log_sums, dout, dsinks, accumulate);
}

}  // namespace tandem
