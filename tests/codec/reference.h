// Reference implementation of docs/reference/wire-formats.md: one value at a time, with every byte
// offset computed from the value's index.
#pragma once

#include <cstddef>
#include <vector>

#include "codec/dither.h"
#include "tandem/codec.h"

namespace tandem::test {

/// `dither`: nullptr rounds to nearest.
std::vector<std::byte> reference_message(const Wire& wire, const std::vector<float>& values,
                                         DType dtype, const codec::Dither* dither = nullptr);
std::vector<float> reference_values(const Wire& wire, const std::vector<std::byte>& message,
                                    int64_t count);

}  // namespace tandem::test
