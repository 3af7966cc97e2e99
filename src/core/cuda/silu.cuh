// e^x and sigmoid with the values of the CPU's kernels.
#pragma once

namespace tandem::gpu {

/// e^x with x clamped to [-87.3, 88], as on the CPU; NaN stays NaN.
__device__ inline float clamped_exp(float x) {
  x = x < -87.3f ? -87.3f : x;
  x = x > 88.0f ? 88.0f : x;
  return expf(x);
}

__device__ inline float sigmoid(float x) {
  return __fdiv_rn(1.0f, 1.0f + clamped_exp(-x));
}

}  // namespace tandem::gpu
