// The oracle: out = the sum over ranks of x x weight^T, + bias, unfused.
// A plain collective and one product; allocates, and rounds between the two.
#pragma once

#include "tandem/collectives.h"

namespace tandem {

void gemm_ar_reference(Communicator& comm, const Tensor& x, const Tensor& weight, const Tensor& out,
                       const Tensor* bias);

}  // namespace tandem
