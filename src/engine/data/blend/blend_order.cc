#include "engine/data/blend/blend_order.h"

#include <algorithm>
#include <numeric>
#include <utility>

namespace tandem {
namespace {

__extension__ using Wide = unsigned __int128;

/// Fractions are multiples of 2^-60.
constexpr uint64_t kOne = uint64_t(1) << 60;
/// The golden ratio's fractional part, rounded to an odd number: all 2^60 fractions occur.
constexpr uint64_t kGolden = 0x9e3779b97f4a7c1;

/// Sum of floor((a i + b) / m) over i in [0, n), by Euclid's algorithm on a and m.
Wide floor_sum(Wide n, Wide m, Wide a, Wide b) {
  Wide sum = 0;
  for (;;) {
    sum += n * (n - 1) / 2 * (a / m) + n * (b / m);
    a %= m;
    b %= m;
    const Wide last = a * n + b;
    if (last < m) return sum;
    n = last / m;
    b = last % m;
    std::swap(m, a);
  }
}

uint64_t fraction(int64_t sample) {
  return uint64_t(sample) * kGolden % kOne;  // 2^60 divides 2^64: overflow is harmless
}

/// Number of samples in [0, n) whose fraction is below `bound`.
int64_t count_below(int64_t n, uint64_t bound) {
  if (n == 0) return 0;
  // [x mod m < bound] = 1 + floor(x / m) - floor((x + m - bound) / m), x >= 0
  const Wide count = Wide(n) + floor_sum(Wide(n), kOne, kGolden, 0) -
                     floor_sum(Wide(n), kOne, kGolden, kOne - bound);
  return int64_t(count);
}

}  // namespace

BlendOrder::BlendOrder(std::span<const double> weights) {
  const double total = std::accumulate(weights.begin(), weights.end(), 0.0);
  double sum = 0;
  bounds_.push_back(0);
  for (const double weight : weights) {
    sum += weight;
    bounds_.push_back(std::min(kOne, uint64_t(sum / total * double(kOne))));
  }
  bounds_.back() = kOne;
}

size_t BlendOrder::source(int64_t sample) const {
  const auto after = std::upper_bound(bounds_.begin(), bounds_.end(), fraction(sample));
  return size_t(after - bounds_.begin()) - 1;
}

int64_t BlendOrder::count(size_t source, int64_t sample) const {
  return count_below(sample, bounds_[source + 1]) - count_below(sample, bounds_[source]);
}

}  // namespace tandem
