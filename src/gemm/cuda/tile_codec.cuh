// A warpgroup's half of a tile of gemm_block.cuh in a wire format, from its accumulators and back
// into those of another rank's warpgroup: the codes and scales that a message of each row would
// have (docs/wire-formats.md).
//
// An accumulator's row is shared by the four lanes of a quad, which have two of each eight columns.
// Of 16 columns 8 h + 2 l + b, lane l of a block of codec/cuda has elements 4 l + 2 h + b: a
// group's elements, of which it has 16 or more, change places only among themselves. So a row's 128
// columns are a block as they are, no value changes its lane, and who adds them has the same ones.
//
// A box is a piece (codec/cuda/piece.cuh) of 32 rows and 128 columns. Four boxes, rows 0-7 of each
// 16 and 8-15, columns 0-127 and 128-255, are a slice.
#pragma once

#include "codec/cuda/piece.cuh"

namespace tandem::gpu::fused {

/// As EncodedPiece.
template <class Code, int kGroup>
struct TileCodec {
  static constexpr int kThreads = 128, kBoxes = 4;
  static constexpr int kSums = 128;  // of a thread
  using Piece = EncodedPiece<Code, kGroup, kThreads>;
  static constexpr int kStoredWords = Piece::kWords + 1;  // of a box: codes, and their scale
  static constexpr int kBoxBytes = Piece::kBytes, kSliceBytes = kBoxes * kBoxBytes;

  /// Of the accumulators, the one that is in place `e` of a lane's 32 of a box.
  static constexpr int sum_at(int box, int e) {
    return 64 * (box / 2) + 8 * (e / 4) + 4 * (e / 2 % 2) + 2 * (box % 2) + e % 2;
  }

  /// By all lanes of a warp.
  template <int kStored>
  __device__ static void encode(const float (&sums)[kSums], float limit, int lane,
                                uint32_t (&stored)[kStored]) {
    static_assert(kBoxes * kStoredWords <= kStored);
#pragma unroll
    for (int box = 0; box < kBoxes; ++box) {
      float x[kOwn];
#pragma unroll
      for (int e = 0; e < kOwn; ++e) x[e] = sums[sum_at(box, e)];
      Piece piece;
      piece.encode(x, limit, lane);
#pragma unroll
      for (int w = 0; w < Piece::kWords; ++w) stored[box * kStoredWords + w] = piece.words[w];
      stored[box * kStoredWords + Piece::kWords] = piece.scale;
    }
  }
  /// A thread's share of box `box` to where that begins.
  template <int kStored>
  __device__ static void write(const uint32_t (&stored)[kStored], int box, std::byte* to,
                               int thread) {
    Piece piece;
#pragma unroll
    for (int w = 0; w < Piece::kWords; ++w) piece.words[w] = stored[box * kStoredWords + w];
    piece.scale = stored[box * kStoredWords + Piece::kWords];
    piece.store(to, thread);
  }
  /// Adds what a slice in shared memory holds: each value with one rounding, that of the sum.
  __device__ static void add(float (&sums)[kSums], const std::byte* slice, int thread) {
#pragma unroll
    for (int box = 0; box < kBoxes; ++box) {
      Piece::for_values_of(
          slice + box * kBoxBytes, thread, [](const auto* from) { return *from; },
          [&](int e, float code, float scale) {
            float& sum = sums[sum_at(box, e)];
            sum = __fmaf_rn(code, scale, sum);
          });
    }
  }
};

}  // namespace tandem::gpu::fused
