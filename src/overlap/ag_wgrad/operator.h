#pragma once

#include "overlap/contract/operator_row.h"

namespace tandem {

OpDesc ag_wgrad_desc(const Communicator& comm, const AgWgrad::Shape& shape);

OnGpu ag_wgrad_on_gpu;
extern const OperatorRow kAgWgradRow;

}  // namespace tandem
