// A block of 128 elements in the registers of four threads of a warp: its elements to and from a
// tensor, its codes to and from the planes of a message. Thread `lane` of the four has element
// 16 j + 4 lane + i in place 4 j + i, so that planes are packed with shifts alone
// (codec/planes.h). All threads of a warp call these together; `on` is whether a thread's block
// exists.
#pragma once

#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "codec/cuda/wire_job.h"
#include "codec/numbers.h"
#include "tandem/dtype.h"

namespace tandem::gpu {

constexpr int kOwn = 32;     // elements of a thread
constexpr int kVectors = 8;  // j
constexpr unsigned kAllLanes = ~0u;

template <typename V, typename Join>
__device__ V over_quad(V value, const Join& join) {
  value = join(value, __shfl_xor_sync(kAllLanes, value, 1));
  return join(value, __shfl_xor_sync(kAllLanes, value, 2));
}

/// Makes of every vector's value that of its group.
template <typename V, typename Join>
__device__ void over_groups(int group, V (&of)[kVectors], const Join& join) {
#pragma unroll
  for (int width = 1; width < kVectors; width *= 2) {
    if (group <= 16 * width) return;
#pragma unroll
    for (int j = 0; j < kVectors; j += 2 * width) {
      const V both = join(of[j], of[j + width]);
#pragma unroll
      for (int k = j; k < j + 2 * width; ++k) of[k] = both;
    }
  }
}

/// An element of a block, in its group.
__device__ inline int in_group(const WireJob& wire, int element) {
  return element & (wire.group - 1);
}
__device__ inline bool begins_group(const WireJob& wire, int j) {
  return in_group(wire, 16 * j) == 0;
}
__device__ inline int64_t group_of(const WireJob& wire, int64_t block, int j) {
  return (block * kWireBlock + 16 * j) >> wire.shift;
}

__device__ inline float widened(DType dtype, uint16_t bits) {
  return dtype == DType::bf16 ? BFloat16{bits}.to_float() : __half2float(__ushort_as_half(bits));
}
/// NaN has the bits that it has on the CPU.
__device__ inline float canonical(float value) {
  return isnan(value) ? __uint_as_float(codec::kNaNBits) : value;
}
__device__ inline uint16_t narrowed(DType dtype, float value) {
  if (dtype == DType::bf16) return BFloat16::from_float(canonical(value)).bits;
  return isnan(value) ? uint16_t(0x7e00) : __half_as_ushort(__float2half_rn(value));
}

/// Whether all of a thread's elements exist and lie at multiples of 4 of them.
__device__ inline bool is_whole(const void* values, DType dtype, int64_t elements, int64_t block) {
  const uintptr_t alignment = dtype == DType::f32 ? 16 : 8;
  return (block + 1) * kWireBlock <= elements &&
         reinterpret_cast<uintptr_t>(values) % alignment == 0;
}

// Blocks that are not whole, one element at a time.
static __device__ __noinline__ void load_partial(const void* values, DType dtype, int64_t elements,
                                                 int64_t first, float* x) {
  for (int e = 0; e < kOwn; ++e) {
    const int64_t wanted = first + 16 * (e / 4) + e % 4;
    const int64_t at = wanted < elements ? wanted : elements - 1;
    x[e] = dtype == DType::f32 ? static_cast<const float*>(values)[at]
                               : widened(dtype, static_cast<const uint16_t*>(values)[at]);
  }
}
static __device__ __noinline__ void store_partial(void* values, DType dtype, int64_t elements,
                                                  int64_t first, const float* x) {
  for (int e = 0; e < kOwn; ++e) {
    const int64_t at = first + 16 * (e / 4) + e % 4;
    if (at >= elements) continue;
    if (dtype == DType::f32) {
      static_cast<float*>(values)[at] = canonical(x[e]);
    } else {
      static_cast<uint16_t*>(values)[at] = narrowed(dtype, x[e]);
    }
  }
}

/// Past the end the last element is repeated. Where not `on`, zeros.
__device__ inline void load_elements(const void* values, DType dtype, int64_t elements,
                                     int64_t block, int lane, bool on, float (&x)[kOwn]) {
  const int64_t first = block * kWireBlock + 4 * lane;
  if (!on || !is_whole(values, dtype, elements, block)) {
    float partial[kOwn] = {};
    if (on) load_partial(values, dtype, elements, first, partial);
#pragma unroll
    for (int e = 0; e < kOwn; ++e) x[e] = partial[e];
    return;
  }
#pragma unroll
  for (int j = 0; j < kVectors; ++j) {
    if (dtype == DType::f32) {
      const float4 four =
          *reinterpret_cast<const float4*>(static_cast<const float*>(values) + first + 16 * j);
      x[4 * j] = four.x, x[4 * j + 1] = four.y, x[4 * j + 2] = four.z, x[4 * j + 3] = four.w;
    } else {
      const ushort4 four =
          *reinterpret_cast<const ushort4*>(static_cast<const uint16_t*>(values) + first + 16 * j);
      x[4 * j] = widened(dtype, four.x), x[4 * j + 1] = widened(dtype, four.y);
      x[4 * j + 2] = widened(dtype, four.z), x[4 * j + 3] = widened(dtype, four.w);
    }
  }
}

__device__ inline void store_elements(void* values, DType dtype, int64_t elements, int64_t block,
                                      int lane, bool on, const float (&x)[kOwn]) {
  if (!on) return;
  const int64_t first = block * kWireBlock + 4 * lane;
  if (!is_whole(values, dtype, elements, block)) {
    float partial[kOwn];
#pragma unroll
    for (int e = 0; e < kOwn; ++e) partial[e] = x[e];
    return store_partial(values, dtype, elements, first, partial);
  }
#pragma unroll
  for (int j = 0; j < kVectors; ++j) {
    const float* four = &x[4 * j];
    if (dtype == DType::f32) {
      *reinterpret_cast<float4*>(static_cast<float*>(values) + first + 16 * j) = make_float4(
          canonical(four[0]), canonical(four[1]), canonical(four[2]), canonical(four[3]));
    } else {
      *reinterpret_cast<ushort4*>(static_cast<uint16_t*>(values) + first + 16 * j) =
          make_ushort4(narrowed(dtype, four[0]), narrowed(dtype, four[1]), narrowed(dtype, four[2]),
                       narrowed(dtype, four[3]));
    }
  }
}

/// Past the end the last element again.
__device__ inline void fill_up(int64_t elements, int64_t block, int lane, float (&x)[kOwn]) {
  const int64_t left = elements - block * kWireBlock;
  const int count = left < kWireBlock ? int(left) : kWireBlock;
  if (!__any_sync(kAllLanes, count < kWireBlock)) return;
  const auto place_of = [lane](int e) { return 16 * (e / 4) + 4 * lane + e % 4; };
  float last = 0;
#pragma unroll
  for (int e = 0; e < kOwn; ++e) {
    if (place_of(e) == count - 1) last = x[e];
  }
  last = __shfl_sync(kAllLanes, last, (count - 1) % 16 / 4, kQuad);
#pragma unroll
  for (int e = 0; e < kOwn; ++e) {
    if (place_of(e) >= count) x[e] = last;
  }
}

/// words[k] of thread l becomes words[l] of thread k.
__device__ inline void transpose(uint32_t* words, int lane) {
#pragma unroll
  for (int bit = 1; bit < kQuad; bit *= 2) {
    const bool upper = lane & bit;
#pragma unroll
    for (int k = 0; k < kQuad; ++k) {
      if (k & bit) continue;
      const uint32_t given = upper ? words[k] : words[k | bit];
      const uint32_t got = __shfl_xor_sync(kAllLanes, given, bit);
      (upper ? words[k] : words[k | bit]) = got;
    }
  }
}

/// A thread's codes as words, from bit kFrom of each code on.
template <int kBits, int kFrom>
struct Plane {
  static constexpr int kWords = kBits == 8 ? 8 : kBits == 4 ? 4 : kBits == 2 ? 2 : 1;
  uint32_t words[kWords];

  __device__ void pack(const uint32_t (&codes)[kOwn], int lane) {
#pragma unroll
    for (int w = 0; w < kWords; ++w) words[w] = 0;
#pragma unroll
    for (int e = 0; e < kOwn; ++e) {
      const uint32_t bits = (codes[e] >> kFrom) & ((1u << kBits) - 1u);
      const int j = e / 4, i = e % 4;
      if constexpr (kBits == 8) words[j] |= bits << (8 * i);
      if constexpr (kBits == 4) words[i] |= bits << (4 * j);
      if constexpr (kBits == 2) words[i / 2] |= bits << (16 * (i % 2) + 2 * j);
      if constexpr (kBits == 1) words[0] |= bits << (8 * i + j);
    }
    if constexpr (kBits == 8) transpose(words, lane), transpose(words + 4, lane);
  }
  /// Adds its bits to `codes`.
  __device__ void unpack(uint32_t (&codes)[kOwn], int lane) {
    if constexpr (kBits == 8) transpose(words, lane), transpose(words + 4, lane);
#pragma unroll
    for (int e = 0; e < kOwn; ++e) {
      const int j = e / 4, i = e % 4;
      uint32_t bits = 0;
      if constexpr (kBits == 8) bits = words[j] >> (8 * i);
      if constexpr (kBits == 4) bits = words[i] >> (4 * j);
      if constexpr (kBits == 2) bits = words[i / 2] >> (16 * (i % 2) + 2 * j);
      if constexpr (kBits == 1) bits = words[0] >> (8 * i + j);
      codes[e] |= (bits & ((1u << kBits) - 1u)) << kFrom;
    }
  }
  __device__ void store(std::byte* plane, int64_t block, int lane) const {
    std::byte* to = plane + block * (kWireBlock / 8 * kBits);
    if constexpr (kWords >= 4) {
#pragma unroll
      for (int w = 0; w < kWords; w += 4) {
        *reinterpret_cast<uint4*>(to + 16 * w + 16 * lane) =
            make_uint4(words[w], words[w + 1], words[w + 2], words[w + 3]);
      }
    } else if constexpr (kWords == 2) {
      *reinterpret_cast<uint2*>(to + 8 * lane) = make_uint2(words[0], words[1]);
    } else {
      *reinterpret_cast<uint32_t*>(to + 4 * lane) = words[0];
    }
  }
  /// What another GPU may have stored: never from this SM's cache.
  __device__ void load(const std::byte* plane, int64_t block, int lane) {
    const std::byte* from = plane + block * (kWireBlock / 8 * kBits);
    if constexpr (kWords >= 4) {
#pragma unroll
      for (int w = 0; w < kWords; w += 4) {
        const uint4 four = __ldcg(reinterpret_cast<const uint4*>(from + 16 * w + 16 * lane));
        words[w] = four.x, words[w + 1] = four.y, words[w + 2] = four.z, words[w + 3] = four.w;
      }
    } else if constexpr (kWords == 2) {
      const uint2 two = __ldcg(reinterpret_cast<const uint2*>(from + 8 * lane));
      words[0] = two.x, words[1] = two.y;
    } else {
      words[0] = __ldcg(reinterpret_cast<const uint32_t*>(from + 4 * lane));
    }
  }
};

}  // namespace tandem::gpu
