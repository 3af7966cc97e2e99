#include "overlap/gemm_rs/reference.h"

#include "collectives/partial_sums.h"
#include "gemm/gemm.h"

namespace tandem {

void gemm_rs_reference(Communicator& comm, const Tensor& x, const Tensor& weight, const Tensor& out,
                       const Tensor* bias) {
  const Memory memory(size_t(x.dim(0) * out.dim(1)) * size_of(x.dtype()));
  const Tensor partial = memory.view(x.dtype(), {x.dim(0), out.dim(1)});
  gemm(x, weight.transposed(), partial);
  const Memory summed(size_t(out.elements()) * size_of(x.dtype()));
  const Tensor rows = summed.view(x.dtype(), {out.dim(0), out.dim(1)});
  reduce_scatter(comm, partial, rows);
  const std::byte* const one[] = {summed.data()};
  reduce_partials(one, x.dtype(), bias, out);
}

}  // namespace tandem
