#include "overlap/gemm_ar/reference.h"

#include "kernels/gemm.h"
#include "overlap/reduce.h"

namespace tandem {

void gemm_ar_reference(Communicator& comm, const Tensor& x, const Tensor& weight, const Tensor& out,
                       const Tensor* bias) {
  const Buffer memory(size_t(out.elements()) * size_of(x.dtype()));
  const Tensor sum = memory.view(x.dtype(), {out.dim(0), out.dim(1)});
  gemm(x, weight.transposed(), sum);
  all_reduce(comm, sum);
  const std::byte* const one[] = {memory.data()};
  reduce_partials(one, x.dtype(), bias, out);
}

}  // namespace tandem
