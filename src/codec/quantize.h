// CPU and GPU implementations of quantize_rows (tandem/quantize.h), which checks the operands.
#pragma once

#include "tandem/quantize.h"

namespace tandem {

void quantize_rows_on_cpu(const Tensor& x, const Tensor& codes, const Tensor& scales);

/// Also checks the GPU-only requirements on operands.
void quantize_rows_on_gpu(Communicator& comm, const Tensor& x, const Tensor& codes,
                          const Tensor& scales);

}  // namespace tandem
