// Rates computed from a benchmark's times.
#pragma once

#include <cstdint>

#include "bench/bench.h"

namespace tandem {

/// TFLOP/s of each rank: 2 M N K divided by the ranks.
double tflops(const BenchRequest& request, int ranks, double us);

/// Bytes of the full m x n matrix of a collective.
int64_t matrix_bytes(const BenchRequest& request);

/// GB/s of a collective, as defined by nccl-tests: of the full matrix, and of the bytes that each
/// rank's link must carry, which is comparable to the link's speed for any operation and number of
/// ranks.
struct Bandwidth {
  double algbw = 0, busbw = 0;
};
Bandwidth bandwidth(const BenchRequest& request, int ranks, double us);

}  // namespace tandem
