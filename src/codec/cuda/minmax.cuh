// Min and max that return NaN if an operand is NaN, in one instruction.
#pragma once

#include <cuda_runtime.h>

namespace tandem::gpu {

__device__ inline float least_or_nan(float a, float b) {
  float least;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(least) : "f"(a), "f"(b));
  return least;
}
__device__ inline float most_or_nan(float a, float b) {
  float most;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(most) : "f"(a), "f"(b));
  return most;
}

}  // namespace tandem::gpu
