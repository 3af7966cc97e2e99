#pragma once

#include "overlap/contract/operator_row.h"

namespace tandem {

OpDesc gemm_rs_desc(const Communicator& comm, const GemmRs::Shape& shape);

OnGpu gemm_rs_on_gpu;
extern const OperatorRow kGemmRsRow;

}  // namespace tandem
