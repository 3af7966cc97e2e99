// Grid size of a kernel that runs concurrently with another (concurrent.cuh).
#pragma once

namespace tandem::gpu {

/// Blocks of a kernel that runs concurrently with a GEMM.
struct ConcurrentBlocks {
  int count = 1;
  /// Launches clusters of two if `count` is even. The GEMM's blocks are clusters of two as well,
  /// and could not use leftover SMs that form no pair.
  bool pairs = false;
  constexpr ConcurrentBlocks(int blocks, bool in_pairs = false) : count(blocks), pairs(in_pairs) {}
};

}  // namespace tandem::gpu
