#include "tandem/random.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <numbers>

namespace tandem {
namespace {

// Additions, multiplications, divisions and square roots are rounded exactly: a value has the same
// bits in a vector of any width.

/// Exact, without the conversion of unsigned integers that few vector units have.
inline double to_double(uint32_t value) {
  return std::bit_cast<double>(0x4330000000000000u | uint64_t(value)) - 0x1p52;
}

/// c[0] + z (c[1] + z (c[2] + ...)).
inline double horner(double, double last) {
  return last;
}
template <typename... Rest>
inline double horner(double z, double first, Rest... rest) {
  return first + z * horner(z, rest...);
}

/// Natural logarithm of x in (0, 1], normal; error below 1e-15 of its magnitude.
inline double log_of(double x) {
  constexpr uint64_t kSqrtHalf = 0x3FE6A09E667F3BCDu;
  const uint64_t bits = std::bit_cast<uint64_t>(x);
  const auto exponent = int32_t(uint32_t((bits - kSqrtHalf + (uint64_t(1) << 62)) >> 52)) - 1024;
  const double m = std::bit_cast<double>(bits - (uint64_t(int64_t(exponent)) << 52));
  const double s = (m - 1) / (m + 1), z = s * s;
  const double sum = horner(z, 1.0, 1.0 / 3, 1.0 / 5, 1.0 / 7, 1.0 / 9, 1.0 / 11, 1.0 / 13,
                            1.0 / 15, 1.0 / 17, 1.0 / 19);
  return double(exponent) * std::numbers::ln2 + 2 * s * sum;
}

/// Cosine of 2 pi v, v in [0, 1).
inline double cos_of_turns(double v) {
  const auto quarter = int32_t(4 * v + 0.5);
  const double t = (v - 0.25 * double(quarter)) * (2 * std::numbers::pi), z = t * t;
  const double cosine = horner(-z, 1.0, 1 / 2.0, 1 / 24.0, 1 / 720.0, 1 / 40320.0, 1 / 3628800.0,
                               1 / 479001600.0, 1 / 87178291200.0, 1 / 20922789888000.0);
  const double sine = horner(-z, 1.0, 1 / 6.0, 1 / 120.0, 1 / 5040.0, 1 / 362880.0, 1 / 39916800.0,
                             1 / 6227020800.0, 1 / 1307674368000.0);
  const auto is_sine = -uint64_t(quarter & 1);
  const uint64_t magnitude =
      (std::bit_cast<uint64_t>(sine * t) & is_sine) | (std::bit_cast<uint64_t>(cosine) & ~is_sine);
  return std::bit_cast<double>(magnitude ^ uint64_t((quarter + 1) & 2) << 62);
}

inline float normal_of(uint32_t first, uint32_t second) {
  const double u = (to_double(first) + 1) * 0x1p-32, v = to_double(second) * 0x1p-32;
  return float(std::sqrt(-2 * log_of(u)) * cos_of_turns(v));
}

constexpr size_t kBlock = 256;
struct Words {
  alignas(64) uint32_t at[4][kBlock];
};

/// philox of `count` successive indices.
void draw(uint64_t seed, uint64_t stream, uint64_t first, size_t count, Words& words) {
  auto& c = words.at;
  for (size_t i = 0; i < count; ++i) {
    c[0][i] = uint32_t(first + i), c[1][i] = uint32_t((first + i) >> 32);
    c[2][i] = uint32_t(stream), c[3][i] = uint32_t(stream >> 32);
  }
  uint32_t k0 = uint32_t(seed), k1 = uint32_t(seed >> 32);
  for (int round = 0; round < 10; ++round) {
    for (size_t i = 0; i < count; ++i) {
      const uint64_t p0 = uint64_t(0xD2511F53u) * c[0][i], p1 = uint64_t(0xCD9E8D57u) * c[2][i];
      c[0][i] = uint32_t(p1 >> 32) ^ c[1][i] ^ k0, c[1][i] = uint32_t(p1);
      c[2][i] = uint32_t(p0 >> 32) ^ c[3][i] ^ k1, c[3][i] = uint32_t(p0);
    }
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
}

}  // namespace

float normal(uint64_t seed, uint64_t stream, uint64_t index) {
  const auto words = philox(seed, stream, index);
  return normal_of(words[0], words[1]);
}

void fill_normal(std::span<float> values, uint64_t seed, uint64_t stream, uint64_t first) {
  Words words;
  for (size_t begin = 0; begin < values.size(); begin += kBlock) {
    const size_t count = std::min(kBlock, values.size() - begin);
    float* const out = values.data() + begin;
    draw(seed, stream, first + begin, count, words);
    for (size_t i = 0; i < count; ++i) out[i] = normal_of(words.at[0][i], words.at[1][i]);
  }
}

}  // namespace tandem
