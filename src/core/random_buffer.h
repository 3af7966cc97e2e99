// Buffers for measurements. Zeros and denormals take a different time than normal numbers.
#pragma once

#include <cstdint>

#include "tandem/tensor.h"

namespace tandem {

/// `elements` of f32, bf16 or e4m3, random in [-1, 1), with a period of a few thousand: cheap to
/// fill. Throws InvalidArgument for another dtype.
Memory random_buffer(DType dtype, int64_t elements, uint64_t seed);

}  // namespace tandem
