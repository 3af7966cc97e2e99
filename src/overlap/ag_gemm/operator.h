#pragma once

#include "overlap/contract/operator_row.h"

namespace tandem {

OpDesc ag_gemm_desc(const Communicator& comm, const AgGemm::Shape& shape);

/// Collective, on GPU ranks (ag_gemm/cuda/operator.cc).
std::unique_ptr<OverlapOperator> ag_gemm_on_gpu(Communicator& comm, const OpDesc& desc,
                                                const OverlapOptions& options);

extern const OperatorRow kAgGemmRow;

}  // namespace tandem
