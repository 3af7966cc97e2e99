#include "overlap/gemm_ar/reference.h"

#include "collectives/partial_sums.h"
#include "gemm/gemm.h"
#include "kernels/norm.h"

namespace tandem {

void gemm_ar_reference(Communicator& comm, const Tensor& x, const Tensor& weight, const Tensor& out,
                       const Tensor* bias, const AddNorm* add_norm) {
  const Memory memory(size_t(out.elements()) * size_of(x.dtype()));
  const Tensor sum = memory.view(x.dtype(), {out.dim(0), out.dim(1)});
  gemm(x, weight.transposed(), sum);
  all_reduce(comm, sum);
  const std::byte* const one[] = {memory.data()};
  if (!add_norm) return reduce_partials(one, x.dtype(), bias, out);
  reduce_partials(one, x.dtype(), bias, add_norm->hidden, &add_norm->residual);
  rms_norm(Exec{}, add_norm->hidden, add_norm->gain, add_norm->eps, out);
}

}  // namespace tandem
