// Wire format of a warpgroup's half of a tile of gemm_block.cuh, encoded from its accumulators and
// added to those of another rank's warpgroup: the same codes and scales as a message of each row
// (docs/reference/wire-formats.md).
//
// An accumulator row is shared by the four lanes of a quad, each with two of every eight columns.
// In 16 columns 8 h + 2 l + b, lane l of a block of codec/cuda has elements 4 l + 2 h + b: elements
// are only permuted within a group, which has 16 or more. So a row's 128 columns are a block as
// they are, no value changes its lane, and the rank that adds them has the same layout.
//
// A box is an encoded chunk (codec/cuda/encoded_chunk.cuh) of 32 rows and 128 columns. Four boxes,
// rows 0-7 of each 16 and 8-15, columns 0-127 and 128-255, are a slice.
#pragma once

#include "codec/cuda/encoded_chunk.cuh"

namespace tandem::gpu::fused {

/// Parameters as for EncodedChunk.
template <class Code, int kGroup>
struct TileCodec {
  static constexpr int kThreads = 128, kBoxes = 4;
  static constexpr int kSums = 128;  // per thread
  using Chunk = EncodedChunk<Code, kGroup, kThreads>;
  static constexpr int kStoredWords = Chunk::kWords + 1;  // per box: codes, and their scale
  static constexpr int kBoxBytes = Chunk::kBytes, kSliceBytes = kBoxes * kBoxBytes;

  /// Index of the accumulator that holds element `e` of a lane's 32 in a box.
  static constexpr int sum_at(int box, int e) {
    return 64 * (box / 2) + 8 * (e / 4) + 4 * (e / 2 % 2) + 2 * (box % 2) + e % 2;
  }

  /// Called by all lanes of a warp.
  template <int kStored>
  __device__ static void encode(const float (&sums)[kSums], float limit, int lane,
                                uint32_t (&stored)[kStored]) {
    static_assert(kBoxes * kStoredWords <= kStored);
#pragma unroll
    for (int box = 0; box < kBoxes; ++box) {
      float x[kLaneValues];
#pragma unroll
      for (int e = 0; e < kLaneValues; ++e) x[e] = sums[sum_at(box, e)];
      Chunk chunk;
      chunk.encode(x, limit, lane);
#pragma unroll
      for (int w = 0; w < Chunk::kWords; ++w) stored[box * kStoredWords + w] = chunk.words[w];
      stored[box * kStoredWords + Chunk::kWords] = chunk.scale;
    }
  }
  /// Writes a thread's share of box `box`, which begins at `to`.
  template <int kStored>
  __device__ static void write(const uint32_t (&stored)[kStored], int box, std::byte* to,
                               int thread) {
    Chunk chunk;
#pragma unroll
    for (int w = 0; w < Chunk::kWords; ++w) chunk.words[w] = stored[box * kStoredWords + w];
    chunk.scale = stored[box * kStoredWords + Chunk::kWords];
    chunk.store(to, thread);
  }
  /// Adds a slice in shared memory: each value with one rounding, that of the sum.
  __device__ static void add(float (&sums)[kSums], const std::byte* slice, int thread) {
#pragma unroll
    for (int box = 0; box < kBoxes; ++box) {
      Chunk::for_values_of(
          slice + box * kBoxBytes, thread, [](const auto* from) { return *from; },
          [&](int e, float code, float scale) {
            float& sum = sums[sum_at(box, e)];
            sum = __fmaf_rn(code, scale, sum);
          });
    }
  }
};

}  // namespace tandem::gpu::fused
