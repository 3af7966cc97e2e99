// Min and max that return NaN if an operand is NaN, in one instruction.
#pragma once

#include <cuda_runtime.h>

namespace tandem::gpu {

__device__ inline float min_or_nan(float a, float b) {
  float minimum;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(minimum) : "f"(a), "f"(b));
  return minimum;
}
__device__ inline float max_or_nan(float a, float b) {
  float maximum;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(maximum) : "f"(a), "f"(b));
  return maximum;
}

}  // namespace tandem::gpu
