// What blocks of product_block.cuh differ in, and the state of the pipelines between their warps.
#pragma once

#include <cstdint>

namespace tandem::gpu::fused {

/// Tiles in pairs that share the weight's rows. The usual form.
struct PairedForm {
  static constexpr int kCluster = 2;
  static constexpr bool kGathered =
      false;  ///< x's rows come by other means than the loading thread
  /// The first half of a tile's columns is the gate of the second: silu(gate) x up is stored, half
  /// as many columns.
  static constexpr bool kGated = false;
  /// The weight is [K, columns]: columns lie one after the other, not what they are multiplied by.
  static constexpr bool kTransposed = false;
};

/// A slot of a ring of barriers, and the phase in which it is.
template <int kSlots>
struct PipelineState {
  int index = 0;
  uint32_t phase = 0;
  __device__ void advance() {
    if (++index == kSlots) index = 0, phase ^= 1;
  }
};

}  // namespace tandem::gpu::fused
