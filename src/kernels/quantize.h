// Rows of floats as e4m3 codes with a scale each, on one rank's CPU.
#pragma once

#include "tandem/tensor.h"

namespace tandem {

/// As the public function (tandem/quantize.h), which checks the arguments.
void quantize_rows_on_cpu(const Tensor& x, const Tensor& codes, const Tensor& scales);

}  // namespace tandem
