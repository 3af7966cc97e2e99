#include "overlap/ag_gemm/reference.h"

#include "gemm/gemm.h"

namespace tandem {

void ag_gemm_reference(Communicator& comm, const Tensor& x, const Tensor& weight, const Tensor& out,
                       const Tensor* bias) {
  const Memory memory(size_t(out.dim(0) * x.dim(1)) * size_of(x.dtype()));
  const Tensor gathered = memory.view(x.dtype(), {out.dim(0), x.dim(1)});
  all_gather(comm, x, gathered);
  gemm(gathered, weight.transposed(), out, {bias, false});
}

}  // namespace tandem
