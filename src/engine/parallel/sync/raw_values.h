// Values of f32 in a message, at any place.
#pragma once

#include <cstddef>
#include <cstring>
#include <span>

#include "tandem/tensor.h"

namespace tandem {

inline void write_raw(const Tensor& values, std::byte* to) {
  std::memcpy(to, values.as<const float>(), size_t(values.elements()) * sizeof(float));
}

/// Sets `mean` to the mean of the messages, added in order.
inline void mean_raw(std::span<const std::byte* const> messages, const Tensor& mean) {
  auto* const to = mean.as<float>();
  for (int64_t i = 0; i < mean.elements(); ++i) {
    float sum = 0;
    for (const std::byte* message : messages) {
      float value;
      std::memcpy(&value, message + size_t(i) * sizeof value, sizeof value);
      sum += value;
    }
    to[i] = sum / float(messages.size());
  }
}

}  // namespace tandem
