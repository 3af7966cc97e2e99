// A warpgroup's half of a tile of product_block.cuh in a wire format, from its accumulators and
// back into those of another rank's warpgroup: the codes and scales that a message of each row
// would have (docs/wire-formats.md), in an order of their own.
//
// An accumulator's row is shared by the four lanes of a quad, which have two of each eight columns.
// Of 16 columns 8 h + 2 l + b, lane l of a block of codec/cuda has elements 4 l + 2 h + b: a
// group's elements, of which it has 16 or more, change places only among themselves. So a row's 128
// columns are a block as they are, no value changes its lane, and who adds them has the same ones.
//
// A box is 64 x 128 values of every other row of eight: of 32 rows. Codes lie by 16 bytes a thread,
// first those of all threads' first four words; then the scales, bf16, by row and group. Four
// boxes, rows 0-7 of 16 and 8-15, columns 0-127 and 128-255, are a slice.
#pragma once

#include "codec/cuda/block.cuh"

namespace tandem::gpu::fused {

/// `Code`: of codec/numbers.h, of 8 or 4 bits; kGroup: 128 or 32 elements that share a bf16 scale.
template <class Code, int kGroup>
struct EncodedTile {
  static_assert(Code::bits == 8 || Code::bits == 4);
  static_assert(kGroup == 128 || kGroup == 32);
  static constexpr int kThreads = 128, kBoxes = 4;
  static constexpr int kSums = 128;                // of a thread
  static constexpr int kWords = Code::bits;        // of 32 codes
  static constexpr int kStoredWords = kWords + 1;  // and its scale
  static constexpr int kCodeBytes = kThreads * kWords * 4;
  static constexpr int kScalesOfRow = 128 / kGroup;  // in a box
  static constexpr int kBoxBytes = kCodeBytes + 32 * kScalesOfRow * 2;
  static constexpr int kSliceBytes = kBoxes * kBoxBytes;
  static_assert(kBoxBytes % 16 == 0);
  using Block = EncodedBlock<Code, Transform::none>;

  /// Of the accumulators, the one that is in place `e` of a lane's 32 of a box.
  static constexpr int sum_at(int box, int e) {
    return 64 * (box / 2) + 8 * (e / 4) + 4 * (e / 2 % 2) + 2 * (box % 2) + e % 2;
  }

  /// By all lanes of a warp. `limit`: beyond it a group decodes as NaN (WireJob).
  template <int kStored>
  __device__ static void encode(const float (&sums)[kSums], float limit, int lane,
                                uint32_t (&stored)[kStored]) {
    static_assert(kBoxes * kStoredWords <= kStored);
    WireJob wire;
    wire.group = kGroup, wire.shift = kGroup == 128 ? 7 : 5;
    wire.limit = limit;
#pragma unroll
    for (int box = 0; box < kBoxes; ++box) {
      float x[kOwn];
#pragma unroll
      for (int e = 0; e < kOwn; ++e) x[e] = sums[sum_at(box, e)];
      Block block;
      block.encode(wire, x, lane % kQuad);
      uint32_t* const words = stored + box * kStoredWords;
      if constexpr (Code::bits == 8) {
#pragma unroll
        for (int w = 0; w < kWords; ++w) words[w] = block.codes[w];
      } else {
        Plane<4, 0> plane;
        plane.pack(block.codes, lane % kQuad);
#pragma unroll
        for (int w = 0; w < kWords; ++w) words[w] = plane.words[w];
      }
      words[kWords] = codec::stored_scale<ScaleKind::bf16>(block.scale[0]);
    }
  }

  /// A thread's share of box `box` to where that begins.
  template <int kStored>
  __device__ static void write(const uint32_t (&stored)[kStored], int box, std::byte* to,
                               int thread) {
    const uint32_t* const words = stored + box * kStoredWords;
#pragma unroll
    for (int w = 0; w < kWords; w += 4) {
      reinterpret_cast<uint4*>(to)[w / 4 * kThreads + thread] =
          make_uint4(words[w], words[w + 1], words[w + 2], words[w + 3]);
    }
    auto* const scales = reinterpret_cast<uint16_t*>(to + kCodeBytes);
    if constexpr (kScalesOfRow == 4) {
      scales[thread] = uint16_t(words[kWords]);
    } else {
      if (thread % kQuad == 0) scales[thread / kQuad] = uint16_t(words[kWords]);
    }
  }

  /// Adds what a slice holds.
  __device__ static void add(float (&sums)[kSums], const std::byte* slice, int thread) {
#pragma unroll
    for (int box = 0; box < kBoxes; ++box) {
      const std::byte* const from = slice + box * kBoxBytes;
      uint32_t words[kWords];
#pragma unroll
      for (int w = 0; w < kWords; w += 4) {
        const uint4 four = reinterpret_cast<const uint4*>(from)[w / 4 * kThreads + thread];
        words[w] = four.x, words[w + 1] = four.y, words[w + 2] = four.z, words[w + 3] = four.w;
      }
      float scales[kScalesOfRow];
      read_scales(from + kCodeBytes, thread, scales);
      uint32_t codes[kCodeWords];
      unpack(words, thread, codes);
      // A code's value by a bf16 scale is exact: one rounding, that of the sum.
      for_values<Code>(codes, [&](int e, float value) {
        float& sum = sums[sum_at(box, e)];
        sum = __fmaf_rn(value, scales[16 * (e / 4) / kGroup], sum);
      });
    }
  }

 private:
  __device__ static void read_scales(const std::byte* from, int thread,
                                     float (&scales)[kScalesOfRow]) {
    if constexpr (kScalesOfRow == 4) {
      const uint2 four = reinterpret_cast<const uint2*>(from)[thread / kQuad];
      scales[0] = codec::float_of<float>(four.x << 16);
      scales[1] = codec::float_of<float>(four.x & 0xffff0000u);
      scales[2] = codec::float_of<float>(four.y << 16);
      scales[3] = codec::float_of<float>(four.y & 0xffff0000u);
    } else {
      const uint32_t one = reinterpret_cast<const uint16_t*>(from)[thread / kQuad];
      scales[0] = codec::float_of<float>(one << 16);
    }
  }
  __device__ static void unpack(const uint32_t (&words)[kWords], int thread,
                                uint32_t (&codes)[kCodeWords]) {
    if constexpr (Code::bits == 8) {
#pragma unroll
      for (int w = 0; w < kWords; ++w) codes[w] = words[w];
    } else {
      Plane<4, 0> plane;
#pragma unroll
      for (int w = 0; w < kWords; ++w) plane.words[w] = words[w];
#pragma unroll
      for (uint32_t& word : codes) word = 0;
      plane.unpack(codes, thread % kQuad);
    }
  }
};

}  // namespace tandem::gpu::fused
