// Flat arrays in host memory as spans and as tensors.
#pragma once

#include <span>
#include <vector>

#include "tandem/tensor.h"

namespace tandem {

inline std::span<float> floats(const Tensor& tensor) {
  return {tensor.data_as<float>(), size_t(tensor.elements())};
}

inline Tensor flat(std::span<float> values) {
  return Tensor::of(values, {int64_t(values.size())});
}

}  // namespace tandem
