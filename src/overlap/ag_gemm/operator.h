#pragma once

#include "overlap/contract/operator_row.h"

namespace tandem {

OpDesc ag_gemm_desc(const Communicator& comm, const AgGemm::Shape& shape);

OnGpu ag_gemm_on_gpu;
extern const OperatorRow kAgGemmRow;

}  // namespace tandem
