// Estimated duration of kernels that run concurrently with an expert GEMM; their blocks then join
// the GEMM (GroupedCut::joining). Measured on an H100 (docs/results/gpu-experiments.md).
#pragma once

#include <algorithm>
#include <cstdint>

#include "gemm/cuda/grouped.h"

namespace tandem::gpu {

/// Microseconds for `blocks` to permute a byte of rows.
constexpr double sorting_us_of_byte(int blocks) {
  constexpr double kBytesOfUs = 32e3;  // per block
  return 1 / (kBytesOfUs * double(blocks));
}
/// Microseconds for `blocks` to send a byte.
constexpr double sending_us_of_byte(int blocks) {
  constexpr double kBytesOfUs = 30e3, kMax = 350e3;  // per block; of the link
  return 1 / std::min(kBytesOfUs * double(blocks), kMax);
}

/// Tiles of the first GEMM that a block computes per microsecond: at 660 TFLOP/s of 132 SMs.
constexpr double tiles_of_us(int64_t hidden) {
  constexpr double kFlopsOfUs = 5e6;
  return kFlopsOfUs / (2.0 * kGroupedRows * kGroupedColumns * double(hidden));
}

}  // namespace tandem::gpu
