// The GPU side of quantize_rows.
#pragma once

#include "tandem/quantize.h"

namespace tandem {

/// Operands as checked by the public function, but for what only GPUs ask of them.
void quantize_rows_on_gpu(Communicator& comm, const Tensor& x, const Tensor& codes,
                          const Tensor& scales);

}  // namespace tandem
