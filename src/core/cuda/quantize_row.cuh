// Row quantization to e4m3 shared by kernels; same bits as the CPU (codec/quantize.h).
#pragma once

#include <cfloat>

#include "core/cuda/element.cuh"

namespace tandem::gpu {

constexpr int kCodesAtOnce = 16;  // per thread: 16 bytes of codes

/// Copied from memory as a whole, so that loads are of 16 bytes: not passed on by reference.
template <typename T>
struct alignas(16) Sixteen {
  T at[kCodesAtOnce];
};

/// Running absmax. Ignores NaN, as fmaxf does.
template <typename T>
__device__ float largest(float maximum, const Sixteen<T>& values) {
#pragma unroll
  for (int e = 0; e < kCodesAtOnce; ++e) maximum = fmaxf(maximum, fabsf(to_float(values.at[e])));
  return maximum;
}

/// Scale of a row whose absmax is `maximum`.
__device__ inline float row_scale(float maximum) {
  return fmaxf(__fdiv_rn(maximum, Float8E4M3::kMax), FLT_MIN);
}

/// Codes of two values, the first in the lower byte, by one instruction; saturates.
__device__ inline uint16_t code_pair(float first, float second) {
  return __nv_cvt_float2_to_fp8x2(make_float2(first, second), __NV_SATFINITE, __NV_E4M3);
}

template <typename T>
__device__ Sixteen<__nv_fp8_e4m3> quantized(const Sixteen<T>& values, float scale) {
  Sixteen<__nv_fp8_e4m3> codes;
#pragma unroll
  for (int e = 0; e < kCodesAtOnce; e += 2) {
    const uint16_t pair = code_pair(__fdiv_rn(to_float(values.at[e]), scale),
                                    __fdiv_rn(to_float(values.at[e + 1]), scale));
    codes.at[e].__x = uint8_t(pair);
    codes.at[e + 1].__x = uint8_t(pair >> 8);
  }
  return codes;
}

}  // namespace tandem::gpu
