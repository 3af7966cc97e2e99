// The wire formats as docs/wire-formats.md has them, one value after the other, with bytes placed
// by arithmetic on their positions alone.
#pragma once

#include <cstddef>
#include <vector>

#include "tandem/codec.h"

namespace tandem::test {

std::vector<std::byte> reference_message(const Wire& wire, const std::vector<float>& values,
                                         DType dtype);
std::vector<float> reference_values(const Wire& wire, const std::vector<std::byte>& message,
                                    int64_t count);

}  // namespace tandem::test
