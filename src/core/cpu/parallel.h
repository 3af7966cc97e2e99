// Loops over independent rows or heads on this thread's kernel threads (KernelThreads).
// Iterations must be independent, so that results never depend on the number of threads.
#pragma once

#include <omp.h>

#include <algorithm>
#include <cstdint>

#include "core/cpu/float_mode.h"

namespace tandem::cpu {

/// Min rows per thread: fewer do not pay for waking another thread.
constexpr int64_t kMinRows = 64;

/// body(begin, end) over disjoint ranges that cover [0, count).
template <typename Body>
void parallel_ranges(int64_t count, int64_t min_count, const Body& body) {
  const int64_t ranges =
      std::min<int64_t>(omp_get_max_threads(), std::max<int64_t>(1, count / min_count));
  if (ranges <= 1) return body(int64_t{0}, count);
#pragma omp parallel for schedule(static) num_threads(int(ranges))
  for (int64_t range = 0; range < ranges; ++range) {
    const FloatMode mode;
    body(count * range / ranges, count * (range + 1) / ranges);
  }
}

}  // namespace tandem::cpu
