#include "overlap/ag_wgrad/reference.h"

#include "gemm/gemm.h"

namespace tandem {

void ag_wgrad_reference(Communicator& comm, const Tensor& x, const Tensor& dy, const Tensor& dw) {
  const Memory memory(size_t(dy.dim(0) * x.dim(1)) * size_of(x.dtype()));
  const Tensor gathered = memory.view(x.dtype(), {dy.dim(0), x.dim(1)});
  all_gather(comm, x, gathered);
  gemm(dy.transposed(), gathered, dw, {nullptr, true});
}

}  // namespace tandem
