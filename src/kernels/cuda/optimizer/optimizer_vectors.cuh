// Vectors of four elements, and the moments' update, shared by the optimizers' kernels.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>
#include <type_traits>

#include "kernels/optimizer.h"

namespace tandem::gpu {

constexpr int kThreads = 256;
constexpr int kWidth = 4;

inline bool has_vectors(const Tensor& t) {
  return reinterpret_cast<uintptr_t>(t.data()) % (kWidth * size_of(t.dtype())) == 0;
}

inline unsigned blocks_for(int64_t items) {
  return unsigned((items - 1) / kThreads + 1);
}

struct alignas(8) FourBf16 {
  __nv_bfloat162 low, high;
};
/// Four elements of T, float or bf16.
template <typename T>
using Four = std::conditional_t<std::is_same_v<T, float>, float4, FourBf16>;

inline __device__ float4 to_floats(const float4& x) {
  return x;
}
inline __device__ float4 to_floats(const FourBf16& x) {
  const float2 low = __bfloat1622float2(x.low), high = __bfloat1622float2(x.high);
  return {low.x, low.y, high.x, high.y};
}

inline __device__ FourBf16 to_bf16(const float4& x) {
  return {__floats2bfloat162_rn(x.x, x.y), __floats2bfloat162_rn(x.z, x.w)};
}

inline __device__ void update_moments(const AdamConstants& s, float gradient, float& m, float& v) {
  const float g = gradient * s.gradient_scale;
  m = s.beta1 * m + (1 - s.beta1) * g;
  v = s.beta2 * v + (1 - s.beta2) * g * g;
}

}  // namespace tandem::gpu
