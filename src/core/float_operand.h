// Check of an operand of kernels in f32.
#pragma once

#include <cstdint>
#include <string_view>

#include "core/exec.h"

namespace tandem {

/// Throws InvalidArgument, with `op` and the operand's `name`, unless it is `elements` contiguous
/// f32 on exec's device.
void require_floats(const Exec& exec, std::string_view op, std::string_view name,
                    const Tensor& tensor, int64_t elements);

}  // namespace tandem
