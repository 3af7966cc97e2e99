// Reference: out = the sum over ranks of x x weight^T, + bias, then AddNorm if given, unfused. Runs
// one GEMM, a serial collective and a norm; allocates, and rounds between them.
#pragma once

#include "tandem/collectives.h"
#include "tandem/norm.h"

namespace tandem {

void gemm_ar_reference(Communicator& comm, const Tensor& x, const Tensor& weight, const Tensor& out,
                       const Tensor* bias, const AddNorm* add_norm = nullptr);

}  // namespace tandem
