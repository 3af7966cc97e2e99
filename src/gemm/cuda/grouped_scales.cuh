// Scales of e4m3 operands of a grouped GEMM: one per row of x and of the weight. All are in memory
// before the kernel starts.
#pragma once

#include "gemm/cuda/grouped.h"

namespace tandem::gpu::fused {

/// Scales of a tile, from its first row and column on.
template <bool kGathered, bool kGated>
struct GroupedScales {
  const float* x;         ///< gathered: of all rows of x
  const int32_t* source;  ///< gathered: row of x for each row
  const float* weight;
  int columns;  ///< number of columns with a scale
  int to_up;    ///< gated: from a column's scale of the gate to that of the up projection

  __device__ float of_row(int row) const {
    if constexpr (kGathered) {
      const int from = __ldg(source + row);
      return from < 0 ? 0.f : __ldg(x + from);
    } else {
      return __ldg(x + row);
    }
  }
  /// Scales of an even column and the next.
  __device__ float2 of_columns(int column, bool up) const {
    if (column >= columns) return {};
    return __ldg(reinterpret_cast<const float2*>(weight + column + (up ? to_up : 0)));
  }
};

/// As in warpgroup_product.cuh. In a gated tile, the second half of the columns is the up
/// projection.
template <bool kGathered, bool kGated, size_t kSums>
__device__ void scale_sums(float (&sums)[kSums], const GroupedScales<kGathered, kGated>& scales,
                           int row, int lane) {
  constexpr int kGroups8 = int(kSums) / 4, kOfGate = kGated ? kGroups8 / 2 : kGroups8;
  const float x[2] = {scales.of_row(row), scales.of_row(row + 8)};
#pragma unroll
  for (int i = 0; i < kGroups8; ++i) {
    const float2 weight = scales.of_columns(8 * (i % kOfGate) + 2 * (lane % 4), i >= kOfGate);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float* const pair = sums + 4 * i + 2 * half;
      pair[0] = pair[0] * x[half] * weight.x;
      pair[1] = pair[1] * x[half] * weight.y;
    }
  }
}

}  // namespace tandem::gpu::fused
