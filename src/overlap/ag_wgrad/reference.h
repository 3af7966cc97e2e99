// Reference: dw += dy^T x all-gather(x), unfused. Runs a serial collective and one GEMM; allocates,
// and rounds between the two.
#pragma once

#include "tandem/collectives.h"

namespace tandem {

void ag_wgrad_reference(Communicator& comm, const Tensor& x, const Tensor& dy, const Tensor& dw);

}  // namespace tandem
