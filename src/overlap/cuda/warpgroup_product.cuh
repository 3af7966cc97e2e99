// The tensor cores' side of a hand-written Hopper GEMM: a warpgroup multiplies 64 rows of x by 256
// of the weight, both in shared memory as tensor_map.h lays them out, 64 along K at a time, and
// keeps the sums in registers. Also the same fragments by their place in a matrix: 16 x 16 of them
// go to shared memory, or come from there, in one instruction of a warp.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cute/arch/copy_sm90.hpp>
#include <cute/arch/mma_sm90_gmma.hpp>
#include <utility>

namespace tandem::gpu::fused {

template <class Element>
struct WarpgroupProduct;
template <>
struct WarpgroupProduct<__nv_bfloat16> {
  using Instruction = cute::SM90::GMMA::MMA_64x256x16_F32BF16BF16_SS<cute::SM90::GMMA::Major::K,
                                                                     cute::SM90::GMMA::Major::K>;
  __device__ static uint32_t pack(float low, float high) {
    const __nv_bfloat162 both = __floats2bfloat162_rn(low, high);
    return reinterpret_cast<const uint32_t&>(both);
  }
  __device__ static float2 unpack(uint32_t both) {
    return __bfloat1622float2(reinterpret_cast<const __nv_bfloat162&>(both));
  }
};
template <>
struct WarpgroupProduct<__half> {
  using Instruction = cute::SM90::GMMA::MMA_64x256x16_F32F16F16_SS<cute::SM90::GMMA::Major::K,
                                                                   cute::SM90::GMMA::Major::K>;
  __device__ static uint32_t pack(float low, float high) {
    const __half2 both = __floats2half2_rn(low, high);
    return reinterpret_cast<const uint32_t&>(both);
  }
  __device__ static float2 unpack(uint32_t both) {
    return __half22float2(reinterpret_cast<const __half2&>(both));
  }
};

constexpr int kStepOfK = 64;          // along K: 128 bytes, a row of the swizzle
constexpr int kProductColumns = 256;  // rows of the weight
constexpr int kAccumulators = 64 * kProductColumns / 128;  // that a thread keeps

/// Of rows of 128 bytes whose chunks are swizzled; `shared` is a multiple of 1024.
__device__ inline uint64_t operand_descriptor(uint32_t shared) {
  constexpr uint64_t kEightRows = 1024 >> 4, kSwizzle128 = 1;
  return (shared & 0x3ffff) >> 4 | uint64_t(1) << 16 | kEightRows << 32 | kSwizzle128 << 62;
}

template <class Element, size_t... i>
__device__ void multiply_16(float (&accumulators)[kAccumulators], uint64_t x, uint64_t weight,
                            cute::SM90::GMMA::ScaleOut scale, std::index_sequence<i...>) {
  WarpgroupProduct<Element>::Instruction::fma(x, weight, accumulators[i]..., scale);
}

/// Issues sums (+)= x[64, 64] x weight[256, 64]^T.
template <class Element>
__device__ void multiply_step(float (&accumulators)[kAccumulators], uint64_t x, uint64_t weight,
                              bool first) {
#pragma unroll
  for (int k = 0; k < kStepOfK / 16; ++k) {
    constexpr uint64_t kSixteen = 16 * sizeof(Element) >> 4;
    multiply_16<Element>(
        accumulators, x + k * kSixteen, weight + k * kSixteen,
        k == 0 && first ? cute::SM90::GMMA::ScaleOut::Zero : cute::SM90::GMMA::ScaleOut::One,
        std::make_index_sequence<kAccumulators>{});
  }
}

__device__ inline void fence_accumulators(float (&accumulators)[kAccumulators]) {
#pragma unroll
  for (float& sum : accumulators) cute::warpgroup_fence_operand(sum);
}

/// Where this lane's part of 16 x 16 values begins: those of rows 16 x `warp` and of columns 16 x
/// `sixteen` of a box of 64 rows of 128 bytes at `box`.
__device__ inline uint32_t lane_address(uint32_t box, int warp, int lane, int sixteen) {
  const int row = 16 * warp + lane % 16, chunk = 2 * sixteen + lane / 16;
  return box + row * 128 + ((chunk ^ (row & 7)) << 4);
}

/// In the order of the sums, which can then take the next tile's.
template <class Element>
__device__ void round_accumulators(const float (&accumulators)[kAccumulators],
                                   uint32_t (&rounded)[kAccumulators / 2]) {
#pragma unroll
  for (int i = 0; i < kAccumulators / 2; ++i) {
    rounded[i] = WarpgroupProduct<Element>::pack(accumulators[2 * i], accumulators[2 * i + 1]);
  }
}

/// Instead of what was rounded, what rounding left over.
template <class Element>
__device__ void keep_rest(const float (&accumulators)[kAccumulators],
                          uint32_t (&rounded)[kAccumulators / 2]) {
  const auto rest = [](float sum, float whole) { return isfinite(whole) ? sum - whole : 0.f; };
#pragma unroll
  for (int i = 0; i < kAccumulators / 2; ++i) {
    const float2 whole = WarpgroupProduct<Element>::unpack(rounded[i]);
    rounded[i] = WarpgroupProduct<Element>::pack(rest(accumulators[2 * i], whole.x),
                                                 rest(accumulators[2 * i + 1], whole.y));
  }
}

/// Four words of a lane: 16 x 16 values.
__device__ inline void store_16(const uint32_t* words, uint32_t to) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to),
               "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3])
               : "memory");
}

/// Adds to columns 16 x `sixteen` of the sums.
template <class Element>
__device__ void add_to_accumulators(float (&accumulators)[kAccumulators], int sixteen,
                                    uint32_t from) {
  uint32_t words[4];
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
               : "r"(from)
               : "memory");
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 values = WarpgroupProduct<Element>::unpack(words[i]);
    accumulators[8 * sixteen + 2 * i] += values.x;
    accumulators[8 * sixteen + 2 * i + 1] += values.y;
  }
}

}  // namespace tandem::gpu::fused
