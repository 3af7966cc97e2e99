// Arrival times and percentiles of requests, for benchmarks of generation and of servers.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "tandem/random.h"

namespace tandem {

/// Times of `count` requests, of which `rate` arrive a second on average, as a Poisson process.
inline std::vector<double> draw_arrivals(uint64_t seed, int64_t count, double rate) {
  std::vector<double> arrivals;
  double at = 0;
  for (int64_t i = 0; i < count; ++i) {
    at -= std::log1p(-double(uniform(seed, stream_of("arrivals"), uint64_t(i)))) / rate;
    arrivals.push_back(at);
  }
  return arrivals;
}

/// Nearest rank; 0 without values.
inline double percentile(std::vector<double> values, double share) {
  if (values.empty()) return 0;
  std::ranges::sort(values);
  const auto rank = int64_t(std::ceil(share * double(values.size())));
  return values[size_t(std::max<int64_t>(1, rank) - 1)];
}

}  // namespace tandem
