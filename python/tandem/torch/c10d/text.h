// Numbers for messages. TORCH_CHECK writes its arguments to a stream of the C++ runtime; if PyTorch
// has brought one of its own, numbers in this code's streams crash. So its arguments are strings.
#pragma once

#include <c10/util/ArrayRef.h>

#include <string>

namespace tandem_c10d {

template <typename Number>
std::string text(Number value) {
  return std::to_string(value);
}

/// "[2, 3]"
inline std::string text_of(c10::IntArrayRef values) {
  std::string all = "[";
  for (const int64_t value : values) all += (all.size() > 1 ? ", " : "") + text(value);
  return all + "]";
}

}  // namespace tandem_c10d
