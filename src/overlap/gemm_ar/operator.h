#pragma once

#include "overlap/contract/operator_row.h"

namespace tandem {

OpDesc gemm_ar_desc(const GemmAr::Shape& shape);

/// Collective, on GPU ranks (gemm_ar/cuda/operator.cc).
std::unique_ptr<OverlapOperator> gemm_ar_on_gpu(Communicator& comm, const OpDesc& desc,
                                                const OverlapOptions& options);

extern const OperatorRow kGemmArRow;

}  // namespace tandem
