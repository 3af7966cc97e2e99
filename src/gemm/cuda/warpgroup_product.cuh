// Tensor-core side of a hand-written Hopper GEMM: a warpgroup multiplies 64 rows of x by some rows
// of the weight, both in shared memory in the layout of tensor_map.h, 128 bytes along K at a time,
// with accumulators in registers. A transposed operand, 64 rows along K of 128 bytes each, is read
// as stored (16-bit types only). Also moves accumulator fragments by matrix position: 16 x 16
// values go to or from shared memory in one instruction of a warp.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cute/arch/copy_sm90.hpp>
#include <cute/arch/mma_sm90_gmma.hpp>
#include <utility>

#include "gemm/cuda/scale.h"

namespace tandem::gpu::fused {

/// Two results packed in a word.
template <class Element>
struct Pair;
template <>
struct Pair<__nv_bfloat16> {
  __device__ static uint32_t pack(float low, float high) {
    const __nv_bfloat162 both = __floats2bfloat162_rn(low, high);
    return reinterpret_cast<const uint32_t&>(both);
  }
  __device__ static float2 unpack(uint32_t both) {
    return __bfloat1622float2(reinterpret_cast<const __nv_bfloat162&>(both));
  }
};
template <>
struct Pair<__half> {
  __device__ static uint32_t pack(float low, float high) {
    const __half2 both = __floats2half2_rn(low, high);
    return reinterpret_cast<const uint32_t&>(both);
  }
  __device__ static float2 unpack(uint32_t both) {
    return __half22float2(reinterpret_cast<const __half2&>(both));
  }
};

/// Properties by operand dtype: columns of the result (rows of the weight) that a warpgroup
/// computes, and whether it is e4m3. The tensor cores accumulate e4m3 products in 14 bits: after
/// every kPromotionSteps k-blocks the accumulators are promoted, that is, added to others in f32,
/// which take as many registers again: hence half the columns. Scales are applied at the end.
template <class Operand>
struct WarpgroupProduct;
constexpr auto major_of(bool transposed) {
  return transposed ? cute::SM90::GMMA::Major::MN : cute::SM90::GMMA::Major::K;
}
template <>
struct WarpgroupProduct<__nv_bfloat16> {
  template <bool kX, bool kWeight>
  using Instruction =
      cute::SM90::GMMA::MMA_64x256x16_F32BF16BF16_SS<major_of(kX), major_of(kWeight)>;
  static constexpr int kColumns = 256;
  static constexpr bool kFp8 = false;
};
template <>
struct WarpgroupProduct<__half> {
  template <bool kX, bool kWeight>
  using Instruction = cute::SM90::GMMA::MMA_64x256x16_F32F16F16_SS<major_of(kX), major_of(kWeight)>;
  static constexpr int kColumns = 256;
  static constexpr bool kFp8 = false;
};
template <>
struct WarpgroupProduct<__nv_fp8_e4m3> {
  template <bool kX, bool kWeight>
  using Instruction = cute::SM90::GMMA::MMA_64x128x32_F32E4M3E4M3_SS_TN<>;
  static constexpr int kColumns = 128;
  static constexpr bool kFp8 = true;
};

/// Bytes of a k-block: a row of the swizzle.
constexpr int kStepBytes = 128;
template <class Operand>
constexpr int kStepOfK = kStepBytes / int(sizeof(Operand));
/// E4m3 k-blocks between promotions.
constexpr int kPromotionSteps = kPromotionK / kStepOfK<__nv_fp8_e4m3>;

/// Bytes of a transposed operand's box: a k-block of rows, 128 bytes of each. The next box holds
/// the next 128 bytes of the rows.
constexpr uint32_t kTransposedBox = 64 * kStepBytes;

/// Descriptor of rows of 128 bytes with swizzled chunks; `shared` is a multiple of 1024.
template <bool kTransposed = false>
__device__ uint64_t operand_descriptor(uint32_t shared) {
  constexpr uint64_t kEightRows = 1024 >> 4, kSwizzle128 = 1;
  constexpr uint64_t kNextBox = kTransposed ? kTransposedBox >> 4 : 1;
  return (shared & 0x3ffff) >> 4 | kNextBox << 16 | kEightRows << 32 | kSwizzle128 << 62;
}
/// Offset of the next 32 bytes along K in units of a descriptor: 16 rows in a transposed operand.
constexpr uint64_t k_stride(bool transposed) {
  return (transposed ? 16 * kStepBytes : 32) >> 4;
}

template <class Instruction, size_t kSums, size_t... i>
__device__ void multiply_32_bytes(float (&sums)[kSums], uint64_t x, uint64_t weight,
                                  cute::SM90::GMMA::ScaleOut scale, std::index_sequence<i...>) {
  Instruction::fma(x, weight, sums[i]..., scale);
}

/// Issues sums = x[64, step] x weight[columns, step]^T, + sums unless `first`. Transposed, an
/// operand is [step, 64] or [step, columns].
template <class Operand, bool kXTransposed = false, bool kWeightTransposed = false, size_t kSums>
__device__ void multiply_step(float (&sums)[kSums], uint64_t x, uint64_t weight, bool first) {
  using Instruction =
      WarpgroupProduct<Operand>::template Instruction<kXTransposed, kWeightTransposed>;
#pragma unroll
  for (int k = 0; k < kStepBytes / 32; ++k) {
    multiply_32_bytes<Instruction>(
        sums, x + k * k_stride(kXTransposed), weight + k * k_stride(kWeightTransposed),
        k == 0 && first ? cute::SM90::GMMA::ScaleOut::Zero : cute::SM90::GMMA::ScaleOut::One,
        std::make_index_sequence<kSums>{});
  }
}

template <size_t kSums>
__device__ void fence_sums(float (&sums)[kSums]) {
#pragma unroll
  for (size_t i = 0; i < kSums; ++i) cute::warpgroup_fence_operand(sums[i]);
}

/// Scales of e4m3 operands: a tile's, from its first row and column on, if there is a scale per row
/// of x and of the weight, else one of each.
struct TileScales {
  ScalePointers from;
  bool by_row;
  int columns;  ///< number of columns with a scale

  /// Scales of the tile at `row` and `column`; `of`: all scales, `columns` of the weight.
  __device__ static TileScales at(const ScalePointers& of, bool by_row, int row, int column,
                                  int columns) {
    if (!by_row) return {of, false, columns};
    return {{of.x + row, of.weight + column}, true, columns - column};
  }
  /// Row whose scale is used for row `row` of the tile.
  __device__ static int row(int row) { return row; }
};

/// `row`: this lane's first row in the tile; its other one is 8 below. x's scales may have arrived
/// while the kernel ran.
template <class Scales, size_t kSums>
__device__ void scale_sums(float (&sums)[kSums], const Scales& scales, int row, int lane) {
  const float x[2] = {__ldcg(scales.from.x + (scales.by_row ? scales.row(row) : 0)),
                      __ldcg(scales.from.x + (scales.by_row ? scales.row(row + 8) : 0))};
  const float of_all = scales.by_row ? 0 : __ldg(scales.from.weight);
#pragma unroll
  for (int i = 0; i < int(kSums) / 4; ++i) {
    const int column = 8 * i + 2 * (lane % 4);
    float2 weight{of_all, of_all};
    if (scales.by_row && column < scales.columns) {
      weight = __ldg(reinterpret_cast<const float2*>(scales.from.weight + column));
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float* const pair = sums + 4 * i + 2 * half;
      pair[0] = pair[0] * x[half] * weight.x;
      pair[1] = pair[1] * x[half] * weight.y;
    }
  }
}

/// Address of this lane's share of 16 x 16 values: rows from 16 x `warp` and columns from 16 x
/// `group16` in a box of 64 rows of 128 bytes at `box`.
__device__ inline uint32_t lane_address(uint32_t box, int warp, int lane, int group16) {
  const int row = 16 * warp + lane % 16, chunk = 2 * group16 + lane / 16;
  return box + row * 128 + ((chunk ^ (row & 7)) << 4);
}

/// Rounds in the order of the accumulators, which are then free for the next tile.
template <class Element, size_t kSums>
__device__ void round_sums(const float (&sums)[kSums], uint32_t (&rounded)[kSums / 2]) {
#pragma unroll
  for (int i = 0; i < int(kSums) / 2; ++i) {
    rounded[i] = Pair<Element>::pack(sums[2 * i], sums[2 * i + 1]);
  }
}

/// Rounds silu(gate) x up; the first half of the columns is the gate of the second.
template <class Element, size_t kSums>
__device__ void round_gated(const float (&sums)[kSums], uint32_t (&rounded)[kSums / 4]) {
  // x / (1 + e^-x); values far below 0 become 0, as does the quotient if e^-x overflows.
  const auto gated = [&](int i) {
    const float gate = sums[i];
    return __fdividef(gate, 1.f + __expf(-gate)) * sums[i + int(kSums) / 2];
  };
#pragma unroll
  for (int i = 0; i < int(kSums) / 4; ++i) {
    rounded[i] = Pair<Element>::pack(gated(2 * i), gated(2 * i + 1));
  }
}

/// Replaces the rounded accumulators (hi) by the rounded remainder (lo).
template <class Element, size_t kSums>
__device__ void round_remainder(const float (&sums)[kSums], uint32_t (&rounded)[kSums / 2]) {
  const auto rest = [](float sum, float whole) { return isfinite(whole) ? sum - whole : 0.f; };
#pragma unroll
  for (int i = 0; i < int(kSums) / 2; ++i) {
    const float2 whole = Pair<Element>::unpack(rounded[i]);
    rounded[i] = Pair<Element>::pack(rest(sums[2 * i], whole.x), rest(sums[2 * i + 1], whole.y));
  }
}

/// Stores a lane's four words: 16 x 16 values per warp.
__device__ inline void store_16(const uint32_t* words, uint32_t to) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to),
               "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3])
               : "memory");
}

/// Adds to columns 16 x `group16` to 16 x `group16` + 15 of the accumulators.
template <class Element, size_t kSums>
__device__ void add_to_sums(float (&sums)[kSums], int group16, uint32_t from) {
  uint32_t words[4];
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
               : "r"(from)
               : "memory");
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 values = Pair<Element>::unpack(words[i]);
    sums[8 * group16 + 2 * i] += values.x;
    sums[8 * group16 + 2 * i + 1] += values.y;
  }
}

}  // namespace tandem::gpu::fused
