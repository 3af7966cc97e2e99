// Random choices of a round, equal on all ranks.
#pragma once

#include <cmath>
#include <cstdint>
#include <utility>
#include <vector>

#include "tandem/random.h"

namespace tandem::fit {

class Draws {
 public:
  Draws(uint64_t seed, const char* name, int64_t round)
      : seed_(seed), stream_(stream_of(name)), index_(uint64_t(round) << 32) {}

  /// Uniform in [0, 1).
  double uniform() { return double(philox(seed_, stream_, index_++)[0]) * 0x1p-32; }
  /// Uniform in [0, n).
  size_t below(size_t n) { return size_t(uniform() * double(n)); }
  /// Number of trials to the first success, each of probability p: mean 1 / p.
  int64_t geometric(double p) {
    if (p >= 1) return 1;
    return 1 + int64_t(std::floor(std::log1p(-uniform()) / std::log1p(-p)));
  }
  template <typename T>
  void shuffle(std::vector<T>& values) {
    for (size_t i = values.size(); i > 1; --i) std::swap(values[i - 1], values[below(i)]);
  }

 private:
  uint64_t seed_, stream_, index_;
};

}  // namespace tandem::fit
