// Byte views of tensors for codec tests.
#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "tandem/dtype.h"
#include "tandem/tensor.h"

namespace tandem::test {

using Bytes = std::vector<std::byte>;

inline Bytes stored_as(DType dtype, const std::vector<float>& values) {
  Bytes all(values.size() * size_of(dtype));
  for (size_t i = 0; i < values.size(); ++i) {
    const float bounded =
        dtype == DType::f16 ? std::clamp(values[i], -65504.0f, 65504.0f) : values[i];
    if (dtype == DType::f32) {
      std::memcpy(&all[4 * i], &bounded, 4);
    } else {
      const uint16_t bits = dtype == DType::bf16 ? BFloat16::from_float(bounded).bits
                                                 : Float16::from_float(bounded).bits;
      std::memcpy(&all[2 * i], &bits, 2);
    }
  }
  return all;
}

inline Tensor host_tensor(Bytes& bytes, DType dtype) {
  return Tensor(bytes.data(), dtype, {int64_t(bytes.size() / size_of(dtype))});
}

/// Position of the first difference, or "".
inline std::string difference(const Bytes& expected, const Bytes& found) {
  const auto at = std::mismatch(expected.begin(), expected.end(), found.begin(), found.end());
  if (at.first == expected.end() && at.second == found.end()) return "";
  return fmt::format("byte {} of {}", at.first - expected.begin(), expected.size());
}

}  // namespace tandem::test
