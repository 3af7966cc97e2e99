// Loads and stores of bf16, f16, f32 and e4m3 elements as floats.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include "tandem/dtype.h"

namespace tandem::gpu {

__device__ inline float to_float(float value) {
  return value;
}
__device__ inline float to_float(__nv_bfloat16 value) {
  return __bfloat162float(value);
}
__device__ inline float to_float(__half value) {
  return __half2float(value);
}

__device__ inline float to_float(__nv_fp8_e4m3 value) {
  return float(value);
}

template <typename T>
__device__ inline T from_float(float value);
template <>
__device__ inline float from_float<float>(float value) {
  return value;
}
template <>
__device__ inline __nv_bfloat16 from_float<__nv_bfloat16>(float value) {
  return __float2bfloat16_rn(value);
}
template <>
__device__ inline __half from_float<__half>(float value) {
  return __float2half_rn(value);
}
template <>
__device__ inline __nv_fp8_e4m3 from_float<__nv_fp8_e4m3>(float value) {
  return __nv_fp8_e4m3(value);  // saturates, like Float8E4M3
}

/// 16-byte vector of T.
template <typename T>
struct alignas(16) Vec {
  static constexpr int kElements = 16 / int(sizeof(T));
  T at[kElements];
};

/// Calls body(T{}) with the element type of `dtype`; returns false if it is no float type.
template <typename Body>
bool with_float_type(DType dtype, const Body& body) {
  switch (dtype) {
    case DType::f32:
      body(float{});
      return true;
    case DType::bf16:
      body(__nv_bfloat16{});
      return true;
    case DType::f16:
      body(__half{});
      return true;
    case DType::i32:
    case DType::u8:
    case DType::e4m3:
      return false;
  }
  return false;
}

/// Same as with_float_type, plus e4m3, which is a storage type: kernels that sum do not accept it.
template <typename Body>
bool with_storage_type(DType dtype, const Body& body) {
  if (dtype != DType::e4m3) return with_float_type(dtype, body);
  body(__nv_fp8_e4m3{});
  return true;
}

}  // namespace tandem::gpu
