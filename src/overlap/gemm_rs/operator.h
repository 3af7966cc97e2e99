#pragma once

#include "overlap/contract/operator_row.h"

namespace tandem {

OpDesc gemm_rs_desc(const Communicator& comm, const GemmRs::Shape& shape);

/// Collective, on GPU ranks (gemm_rs/cuda/operator.cc).
std::unique_ptr<OverlapOperator> gemm_rs_on_gpu(Communicator& comm, const OpDesc& desc,
                                                const OverlapOptions& options);

extern const OperatorRow kGemmRsRow;

}  // namespace tandem
