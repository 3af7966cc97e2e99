// Reference: out = all-gather(x) x weight^T + bias, unfused. Runs a serial collective and one GEMM;
// allocates, and rounds between the two.
#pragma once

#include "tandem/collectives.h"

namespace tandem {

void ag_gemm_reference(Communicator& comm, const Tensor& x, const Tensor& weight, const Tensor& out,
                       const Tensor* bias);

}  // namespace tandem
