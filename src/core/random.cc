#include "tandem/random.h"

#include <cmath>
#include <numbers>

namespace tandem {

float normal(uint64_t seed, uint64_t stream, uint64_t index) {
  const auto words = philox(seed, stream, index);
  const double u = (double(words[0]) + 1) * 0x1p-32, v = double(words[1]) * 0x1p-32;
  return float(std::sqrt(-2 * std::log(u)) * std::cos(2 * std::numbers::pi * v));
}

}  // namespace tandem
