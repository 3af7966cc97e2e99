// Shared by the Hopper kernels of attention: tiles of bf16 rows in shared memory, in boxes of 128
// bytes of each row as gemm/cuda/tensor_map.h stores them, and products of them on the tensor
// cores. Queries and keys are those of attention.h; q and k are rotated.
#pragma once

#include <cutlass/arch/reg_reconfig.h>

#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <utility>

#include "gemm/cuda/gemm_tiles.cuh"
#include "kernels/cuda/sm90/attention_kernels.h"

namespace tandem::gpu::sm90 {

using fused::address_of;
using fused::EmptyBarrier;
using fused::FullBarrier;
using fused::k_stride;
using fused::operand_descriptor;
using fused::PipelineState;
using Pair = fused::Pair<__nv_bfloat16>;

constexpr int kGroups = 2;      // multiplying warpgroups of a block
constexpr int kGroupRows = 64;  // rows of one
constexpr int kThreads = 128 * (kGroups + 1);
constexpr int kLoadingRegisters = 24, kMultiplyingRegisters = 240;
constexpr int kRowBytes = 128;  // of a box
constexpr int kBoxColumns = 64;
constexpr int kBoxBytes = kGroupRows * kRowBytes;

/// Accumulators of a warpgroup's 64 rows x kColumns: sums[4 i + 2 half + e] is in row 16 warp +
/// lane / 4 + 8 half, column 8 i + 2 (lane % 4) + e.
template <int kColumns>
using Sums = float[kColumns / 2];

/// 16 of K: a[64, 16] x b[16, kColumns], each with K contiguous (K) or strided (MN).
template <int kColumns, cute::SM90::GMMA::Major kA, cute::SM90::GMMA::Major kB>
struct Product;
template <cute::SM90::GMMA::Major kA, cute::SM90::GMMA::Major kB>
struct Product<32, kA, kB> {
  using Shared = cute::SM90::GMMA::MMA_64x32x16_F32BF16BF16_SS<kA, kB>;
};
template <cute::SM90::GMMA::Major kA, cute::SM90::GMMA::Major kB>
struct Product<64, kA, kB> {
  using Shared = cute::SM90::GMMA::MMA_64x64x16_F32BF16BF16_SS<kA, kB>;
  using Registers = cute::SM90::GMMA::MMA_64x64x16_F32BF16BF16_RS<kA, kB>;
};
template <cute::SM90::GMMA::Major kA, cute::SM90::GMMA::Major kB>
struct Product<128, kA, kB> {
  using Shared = cute::SM90::GMMA::MMA_64x128x16_F32BF16BF16_SS<kA, kB>;
  using Registers = cute::SM90::GMMA::MMA_64x128x16_F32BF16BF16_RS<kA, kB>;
};
constexpr auto kRowsOfK = cute::SM90::GMMA::Major::K;
constexpr auto kColumnsOfK = cute::SM90::GMMA::Major::MN;

constexpr auto scale_out(bool first) {
  return first ? cute::SM90::GMMA::ScaleOut::Zero : cute::SM90::GMMA::ScaleOut::One;
}
template <class Instruction, size_t kSums, size_t... i>
__device__ __forceinline__ void multiply(float (&sums)[kSums], uint64_t a, uint64_t b, bool first,
                                         std::index_sequence<i...>) {
  Instruction::fma(a, b, sums[i]..., scale_out(first));
}
template <class Instruction, size_t kSums, size_t... i>
__device__ __forceinline__ void multiply(float (&sums)[kSums], const uint32_t* a, uint64_t b,
                                         bool first, std::index_sequence<i...>) {
  Instruction::fma(a[0], a[1], a[2], a[3], b, sums[i]..., scale_out(first));
}

/// Calls body(i) for each i below kCount, a constant: arrays that it indexes are in registers from
/// the first, also where the compiler unrolls loops too late.
template <int kCount, class Body>
__device__ __forceinline__ void for_each(const Body& body) {
  [&]<int... i>(std::integer_sequence<int, i...>) {
    (body(std::integral_constant<int, i>{}), ...);
  }
  (std::make_integer_sequence<int, kCount>{});
}

template <class Value, size_t kCount>
__device__ __forceinline__ void fence(Value (&values)[kCount]) {
  for_each<int(kCount)>([&](auto i) { cute::warpgroup_fence_operand(values[i]); });
}

/// Issues sums = a[64, kHead] x b[kColumns, kHead]^T, both in boxes `a_box` and `b_box` bytes long.
template <int kHead, int kColumns>
__device__ __forceinline__ void multiply_heads(Sums<kColumns>& sums, uint32_t a, int a_box,
                                               uint32_t b, int b_box) {
  using Instruction = typename Product<kColumns, kRowsOfK, kRowsOfK>::Shared;
#pragma unroll
  for (int box = 0; box < kHead / kBoxColumns; ++box) {
    const uint64_t from_a = operand_descriptor(a + box * a_box),
                   from_b = operand_descriptor(b + box * b_box);
#pragma unroll
    for (int k = 0; k < kRowBytes / 32; ++k) {
      multiply<Instruction>(sums, from_a + k * k_stride(false), from_b + k * k_stride(false),
                            box + k == 0, std::make_index_sequence<kColumns / 2>{});
    }
  }
}

/// The operand of 16 x 16 values of accumulators, as words 4 j to 4 j + 3 of `rounded`.
template <size_t kSums>
__device__ __forceinline__ void round(const float (&sums)[kSums], uint32_t (&rounded)[kSums / 2]) {
  for_each<int(kSums) / 2>([&](auto i) { rounded[i] = Pair::pack(sums[2 * i], sums[2 * i + 1]); });
}

__device__ inline float exp2_of(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

/// Transposes 4 x 4 words of four neighbouring lanes.
__device__ inline void transpose(uint32_t (&words)[4], int lane) {
#pragma unroll
  for (int step = 1; step < 4; step *= 2) {
    const bool is_upper = (lane & step) != 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i & step) continue;
      uint32_t &low = words[i], &high = words[i + step];
      const uint32_t other = __shfl_xor_sync(~0u, is_upper ? low : high, step);
      (is_upper ? low : high) = other;
    }
  }
}

/// Descriptor of an operand read as stored whose next 64 columns are a box of `kBox` bytes later.
template <int kBox>
__device__ uint64_t columns_descriptor(uint32_t shared) {
  constexpr uint64_t kAllOfBox = 0x3fff;
  return (operand_descriptor<true>(shared) & ~(kAllOfBox << 16)) | uint64_t(kBox >> 4) << 16;
}

/// Loads a tile's boxes of a head, from `column` and a sequence's `row` on.
template <int kBoxes, class Box>
__device__ void load_boxes(const CUtensorMap& map, FullBarrier& full, Box* to, int column, int row,
                           int sequence) {
#pragma unroll
  for (int box = 0; box < kBoxes; ++box) {
    cute::SM90_TMA_LOAD_3D::copy(&map, reinterpret_cast<uint64_t*>(&full),
                                 uint64_t(cute::TMA::CacheHintSm90::EVICT_NORMAL), to[box],
                                 column + box * kBoxColumns, row, sequence);
  }
}

/// Takes gradients of two neighbouring columns of a rotated row, and of those half a head later, to
/// those of the row before.
class BackRotation {
 public:
  __device__ __forceinline__ BackRotation(const Angles& angles, int position, int column)
      : cos_(pair(angles.cos, angles.half, position, column)),
        sin_(pair(angles.sin, angles.half, position, column)) {}
  __device__ __forceinline__ void apply(float* low, float* high) const {
    turn(cos_.x, sin_.x, low[0], high[0]);
    turn(cos_.y, sin_.y, low[1], high[1]);
  }

 private:
  __device__ static float2 pair(const float* table, int half, int position, int column) {
    return *reinterpret_cast<const float2*>(table + int64_t(position) * half + column);
  }
  __device__ static void turn(float cos, float sin, float& low, float& high) {
    const float before = low;
    low = before * cos + high * sin;
    high = high * cos - before * sin;
  }
  float2 cos_, sin_;
};

/// First key of a query that it reads; does not decrease from query to query, also beyond `seq`.
__device__ inline int first_key(const Mask& mask, int seq, int sequence, int query) {
  const int first = mask.window > 0 ? max(0, query - mask.window + 1) : 0;
  if (!mask.document_starts) return first;
  if (query >= seq) return max(first, seq);
  return max(first, mask.document_starts[int64_t(sequence) * seq + query]);
}

}  // namespace tandem::gpu::sm90
