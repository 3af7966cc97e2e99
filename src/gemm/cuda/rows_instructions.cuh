// Instructions of GEMMs of few rows on Hopper (rows_product.cuh, coded_product.cuh): 64 rows of the
// weight by kRows of x, 16 inputs at a time. x is in shared memory, the weight there or in
// registers.
#pragma once

#include "gemm/cuda/warpgroup_product.cuh"

namespace tandem::gpu::rows {

constexpr auto kAlongK = fused::major_of(false);

template <int kRows>
struct Instructions;
template <>
struct Instructions<8> {
  using OfShared = cute::SM90::GMMA::MMA_64x8x16_F32BF16BF16_SS<kAlongK, kAlongK>;
  using OfRegisters = cute::SM90::GMMA::MMA_64x8x16_F32BF16BF16_RS<kAlongK, kAlongK>;
};
template <>
struct Instructions<16> {
  using OfShared = cute::SM90::GMMA::MMA_64x16x16_F32BF16BF16_SS<kAlongK, kAlongK>;
  using OfRegisters = cute::SM90::GMMA::MMA_64x16x16_F32BF16BF16_RS<kAlongK, kAlongK>;
};
template <>
struct Instructions<32> {
  using OfShared = cute::SM90::GMMA::MMA_64x32x16_F32BF16BF16_SS<kAlongK, kAlongK>;
  using OfRegisters = cute::SM90::GMMA::MMA_64x32x16_F32BF16BF16_RS<kAlongK, kAlongK>;
};
template <>
struct Instructions<64> {
  using OfShared = cute::SM90::GMMA::MMA_64x64x16_F32BF16BF16_SS<kAlongK, kAlongK>;
  using OfRegisters = cute::SM90::GMMA::MMA_64x64x16_F32BF16BF16_RS<kAlongK, kAlongK>;
};

}  // namespace tandem::gpu::rows
