#pragma once

#include "overlap/contract/operator_row.h"

namespace tandem {

OpDesc gemm_ar_desc(const Communicator& comm, const GemmAr::Shape& shape);

OnGpu gemm_ar_on_gpu;
extern const OperatorRow kGemmArRow;

}  // namespace tandem
