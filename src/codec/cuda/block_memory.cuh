// Loads and stores of a block of 128 elements between a tensor and the registers of four threads of
// a warp. Thread `lane` of the four holds element 16 j + 4 lane + i at index 4 j + i, so that
// planes are packed using only shifts (codes.cuh). All threads of a warp must call these functions
// together; `on`: this thread's block exists.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "codec/cuda/wire_params.h"
#include "codec/numbers.h"
#include "tandem/dtype.h"

namespace tandem::gpu {

constexpr int kLaneValues = 32;  // elements per thread
constexpr int kVectors = 8;      // range of j
constexpr unsigned kAllLanes = ~0u;

/// Index of a block's element in its group.
__device__ inline int in_group(const WireParams& wire, int element) {
  return element & (wire.group - 1);
}

/// Replaces NaN by the CPU's NaN bits.
__device__ inline float canonical(float value) {
  return isnan(value) ? __uint_as_float(codec::kNaNBits) : value;
}
__device__ inline float2 widened(DType dtype, uint32_t two) {
  if (dtype == DType::bf16) {
    return make_float2(__uint_as_float(two << 16), __uint_as_float(two & 0xffff0000u));
  }
  return __half22float2(reinterpret_cast<const __half2&>(two));
}
__device__ inline uint32_t narrowed(DType dtype, float low, float high) {
  if (dtype == DType::bf16) {
    const __nv_bfloat162 two = __floats2bfloat162_rn(low, high);
    return reinterpret_cast<const uint32_t&>(two);
  }
  const __half2 two = __floats2half2_rn(low, high);
  return reinterpret_cast<const uint32_t&>(two);
}
/// Same for two halves from `narrowed`.
__device__ inline uint32_t canonical(DType dtype, uint32_t two) {
  const uint32_t infinity = dtype == DType::bf16 ? 0x7f80u : 0x7c00u;
  const uint32_t nan = dtype == DType::bf16 ? 0x7fc0u : 0x7e00u;
  const uint32_t low = two & 0xffffu, high = two >> 16;
  return ((low & 0x7fffu) > infinity ? nan : low) | ((high & 0x7fffu) > infinity ? nan : high)
                                                        << 16;
}

/// Whether all of a thread's elements exist and are aligned to 4 elements.
__device__ inline bool is_whole(const void* values, DType dtype, int64_t elements, int64_t block) {
  const uintptr_t alignment = dtype == DType::f32 ? 16 : 8;
  return (block + 1) * kWireBlock <= elements &&
         reinterpret_cast<uintptr_t>(values) % alignment == 0;
}

/// Elements of a thread in a whole block of bf16 or f16, loaded ahead of use. No-op for f32, which
/// would take too many registers.
struct FetchedHalves {
  uint2 four[kVectors];
  bool are_there = false;

  __device__ void fetch(const void* values, DType dtype, int64_t elements, int64_t block, int lane,
                        bool on) {
    are_there = on && dtype != DType::f32 && is_whole(values, dtype, elements, block);
    if (!are_there) return;
    const int64_t first = block * kWireBlock + 4 * lane;
    const auto* from = reinterpret_cast<const uint2*>(static_cast<const uint16_t*>(values) + first);
#pragma unroll
    for (int j = 0; j < kVectors; ++j) four[j] = from[kQuad * j];
  }
  template <typename With>
  __device__ void widen(DType dtype, const With& with) const {
    const auto widen = [&](DType known) {
#pragma unroll
      for (int j = 0; j < kVectors; ++j) {
        const float2 low = widened(known, four[j].x), high = widened(known, four[j].y);
        with(4 * j, low.x), with(4 * j + 1, low.y);
        with(4 * j + 2, high.x), with(4 * j + 3, high.y);
      }
    };
    return dtype == DType::bf16 ? widen(DType::bf16) : widen(DType::f16);
  }
};

/// Calls `with(e, value)` for a thread's elements, after loading all of them. Past the end the last
/// element is repeated. Zeros if not `on`.
template <typename With>
__device__ void for_elements(const void* values, DType dtype, int64_t elements, int64_t block,
                             int lane, bool on, const With& with) {
  const int64_t first = block * kWireBlock + 4 * lane;
  if (on && is_whole(values, dtype, elements, block)) {
    if (dtype == DType::f32) {
      float4 four[kVectors];
      const auto* from = reinterpret_cast<const float4*>(static_cast<const float*>(values) + first);
#pragma unroll
      for (int j = 0; j < kVectors; ++j) four[j] = from[kQuad * j];
#pragma unroll
      for (int j = 0; j < kVectors; ++j) {
        with(4 * j, four[j].x), with(4 * j + 1, four[j].y);
        with(4 * j + 2, four[j].z), with(4 * j + 3, four[j].w);
      }
      return;
    }
    FetchedHalves halves;
    halves.fetch(values, dtype, elements, block, lane, on);
    return halves.widen(dtype, with);
  }
#pragma unroll
  for (int e = 0; e < kLaneValues; ++e) {
    const int64_t wanted = first + 16 * (e / 4) + e % 4;
    const int64_t at = wanted < elements ? wanted : elements - 1;
    float value = 0;
    if (on) {
      value = dtype == DType::f32
                  ? static_cast<const float*>(values)[at]
                  : widened(dtype, uint32_t(static_cast<const uint16_t*>(values)[at])).x;
    }
    with(e, value);
  }
}

__device__ inline void load_elements(const void* values, DType dtype, int64_t elements,
                                     int64_t block, int lane, bool on, float (&x)[kLaneValues]) {
  for_elements(values, dtype, elements, block, lane, on, [&](int e, float value) { x[e] = value; });
}

/// Stores a partial block, one element at a time.
__device__ inline void store_partial(void* values, DType dtype, int64_t elements, int64_t first,
                                     const float (&x)[kLaneValues]) {
#pragma unroll
  for (int e = 0; e < kLaneValues; ++e) {
    const int64_t at = first + 16 * (e / 4) + e % 4;
    if (at >= elements) continue;
    if (dtype == DType::f32) {
      static_cast<float*>(values)[at] = canonical(x[e]);
    } else {
      static_cast<uint16_t*>(values)[at] = uint16_t(canonical(dtype, narrowed(dtype, x[e], 0.0f)));
    }
  }
}

/// Stores a whole block of bf16 or f16. Tests for NaN in passing: finite values times 0 add up to
/// 0.
template <DType dtype>
__device__ void store_halves(uint16_t* to, const float (&x)[kLaneValues]) {
  uint32_t two[kLaneValues / 2];
#pragma unroll
  for (int e = 0; e < kLaneValues; e += 2) two[e / 2] = narrowed(dtype, x[e], x[e + 1]);
  using Two = std::conditional_t<dtype == DType::bf16, __nv_bfloat162, __half2>;
  uint32_t zeros = 0;
#pragma unroll
  for (const uint32_t& halves : two) {
    const Two none = reinterpret_cast<const Two&>(zeros);
    const uint32_t zero = 0;
    const Two all =
        __hfma2(reinterpret_cast<const Two&>(halves), reinterpret_cast<const Two&>(zero), none);
    zeros = reinterpret_cast<const uint32_t&>(all);
  }
  if (zeros & 0x7fff7fffu) {
#pragma unroll
    for (uint32_t& halves : two) halves = canonical(dtype, halves);
  }
#pragma unroll
  for (int j = 0; j < kVectors; ++j) {
    reinterpret_cast<uint2*>(to)[kQuad * j] = make_uint2(two[2 * j], two[2 * j + 1]);
  }
}

__device__ inline void store_elements(void* values, DType dtype, int64_t elements, int64_t block,
                                      int lane, bool on, const float (&x)[kLaneValues]) {
  if (!on) return;
  const int64_t first = block * kWireBlock + 4 * lane;
  if (!is_whole(values, dtype, elements, block)) {
    return store_partial(values, dtype, elements, first, x);
  }
  if (dtype == DType::f32) {
    auto* const to = reinterpret_cast<float4*>(static_cast<float*>(values) + first);
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
      const float* four = &x[4 * j];
      to[kQuad * j] = make_float4(canonical(four[0]), canonical(four[1]), canonical(four[2]),
                                  canonical(four[3]));
    }
    return;
  }
  uint16_t* const to = static_cast<uint16_t*>(values) + first;
  if (dtype == DType::bf16) return store_halves<DType::bf16>(to, x);
  store_halves<DType::f16>(to, x);
}

/// Repeats the last element past the end.
__device__ inline void fill_up(int64_t elements, int64_t block, int lane, float (&x)[kLaneValues]) {
  const int64_t left = elements - block * kWireBlock;
  const int count = left < kWireBlock ? int(left) : kWireBlock;
  if (!__any_sync(kAllLanes, count < kWireBlock)) return;
  const auto index_of = [lane](int e) { return 16 * (e / 4) + 4 * lane + e % 4; };
  float last = 0;
#pragma unroll
  for (int e = 0; e < kLaneValues; ++e) {
    if (index_of(e) == count - 1) last = x[e];
  }
  last = __shfl_sync(kAllLanes, last, (count - 1) % 16 / 4, kQuad);
#pragma unroll
  for (int e = 0; e < kLaneValues; ++e) {
    if (index_of(e) >= count) x[e] = last;
  }
}

}  // namespace tandem::gpu
