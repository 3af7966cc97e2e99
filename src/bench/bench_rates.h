// What a benchmark's times come to.
#pragma once

#include <cstdint>

#include "bench/bench.h"

namespace tandem {

/// Of each rank: 2 M N K over the ranks that share them, in 10^12 operations a second.
double tflops(const BenchRequest& request, int ranks, double us);

/// The whole m x n matrix of a plain collective.
int64_t matrix_bytes(const BenchRequest& request);

/// GB/s of a plain collective, as nccl-tests define them: of the whole matrix, and of what every
/// rank's link must carry for it, which can be compared with the link's speed for any operation
/// and number of ranks.
struct Bandwidth {
  double algbw = 0, busbw = 0;
};
Bandwidth bandwidth(const BenchRequest& request, int ranks, double us);

}  // namespace tandem
