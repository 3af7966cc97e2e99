#pragma once

#include "overlap/contract/operator_row.h"

namespace tandem {

OpDesc ag_wgrad_desc(const Communicator& comm, const AgWgrad::Shape& shape);

/// Collective, on GPU ranks (ag_wgrad/cuda/operator.cc).
std::unique_ptr<OverlapOperator> ag_wgrad_on_gpu(Communicator& comm, const OpDesc& desc,
                                                 const OverlapOptions& options);

extern const OperatorRow kAgWgradRow;

}  // namespace tandem
