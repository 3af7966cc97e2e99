// How long what runs beside a product of experts takes, about: its blocks join the product then
// (GroupedCut::joining_after). Measured on an H100 (docs/dev/gpu-findings.md).
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "gemm/cuda/grouped.h"

namespace tandem::gpu {

/// Microseconds in which `blocks` put rows of so many bytes into place.
constexpr double sorting_us(double bytes, int blocks) {
  constexpr double kBytesOfUs = 32e3;  // of a block
  return bytes / (kBytesOfUs * double(blocks));
}
/// Microseconds in which `blocks` send so many bytes.
constexpr double sending_us(double bytes, int blocks) {
  constexpr double kBytesOfUs = 30e3, kMost = 350e3;  // of a block; of the link
  return bytes / std::min(kBytesOfUs * double(blocks), kMost);
}

/// Tiles of the first product that a block has in so many microseconds: at 660 TFLOP/s of 132 SMs.
inline int tiles_meanwhile(double us, int64_t hidden) {
  constexpr double kFlopsOfUs = 5e6;
  const double flops = 2.0 * kGroupedRows * kGroupedColumns * double(hidden);
  return std::clamp(int(std::ceil(us / (flops / kFlopsOfUs))), 1, 1 << 12);
}

}  // namespace tandem::gpu
