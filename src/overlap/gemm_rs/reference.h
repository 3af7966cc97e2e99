// Reference: out = rows of the sum over ranks of x x weight^T, + bias, unfused. Runs one GEMM and a
// serial collective; allocates, and rounds between the two.
#pragma once

#include "tandem/collectives.h"

namespace tandem {

void gemm_rs_reference(Communicator& comm, const Tensor& x, const Tensor& weight, const Tensor& out,
                       const Tensor* bias);

}  // namespace tandem
