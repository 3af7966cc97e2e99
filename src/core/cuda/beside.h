// How many blocks a kernel has that runs beside another (beside.cuh).
#pragma once

namespace tandem::gpu {

/// Blocks of a kernel that runs beside a product.
struct BesideBlocks {
  int count = 1;
  /// Two at a time are a cluster, where their number is even: the product's blocks are, too, and
  /// would find SMs left over of which no two can be one.
  bool pairs = false;
  constexpr BesideBlocks(int blocks, bool in_pairs = false) : count(blocks), pairs(in_pairs) {}
};

}  // namespace tandem::gpu
