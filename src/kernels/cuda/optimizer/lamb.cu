#include <cstdint>

#include "core/cuda/check.h"
#include "core/cuda/load_module.cuh"
#include "kernels/cuda/optimizer/optimizer.h"
#include "kernels/cuda/optimizer/optimizer_vectors.cuh"

namespace tandem::gpu {
namespace {

/// Replaces the gradient by the direction.
__device__ void direct(const AdamConstants& s, float weight_decay, float w, float& gradient,
                       float& m, float& v) {
  update_moments(s, gradient, m, v);
  gradient = (m * s.correction1) / (sqrtf(v * s.correction2) + s.eps) + weight_decay * w;
}

__global__ void __launch_bounds__(kThreads)
    lamb_direction_kernel(AdamConstants step, float weight_decay, const float4* w, float4* gradient,
                          float4* m, float4* v, int64_t vectors) {
  const int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= vectors) return;
  const float4 wi = w[i];
  float4 g = gradient[i], mi = m[i], vi = v[i];
  direct(step, weight_decay, wi.x, g.x, mi.x, vi.x);
  direct(step, weight_decay, wi.y, g.y, mi.y, vi.y);
  direct(step, weight_decay, wi.z, g.z, mi.z, vi.z);
  direct(step, weight_decay, wi.w, g.w, mi.w, vi.w);
  gradient[i] = g, m[i] = mi, v[i] = vi;
}

__global__ void __launch_bounds__(kThreads)
    lamb_direction_elements_kernel(AdamConstants step, float weight_decay, const float* w,
                                   float* gradient, float* m, float* v, int64_t count) {
  const int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (i < count) direct(step, weight_decay, w[i], gradient[i], m[i], v[i]);
}

template <bool kWorking>
__global__ void __launch_bounds__(kThreads)
    lamb_update_kernel(float rate, float4* w, const float4* direction, FourBf16* working,
                       int64_t vectors) {
  const int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= vectors) return;
  float4 wi = w[i];
  const float4 u = direction[i];
  wi.x -= rate * u.x, wi.y -= rate * u.y, wi.z -= rate * u.z, wi.w -= rate * u.w;
  w[i] = wi;
  if constexpr (kWorking) working[i] = to_bf16(wi);
}

__global__ void __launch_bounds__(kThreads)
    lamb_update_elements_kernel(float rate, float* w, const float* direction,
                                __nv_bfloat16* working, int64_t count) {
  const int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= count) return;
  w[i] -= rate * direction[i];
  if (working) working[i] = __float2bfloat16_rn(w[i]);
}

}  // namespace

void lamb_direction(cudaStream_t stream, const AdamConstants& step, float weight_decay,
                    const AdamState& state, const Tensor& gradient) {
  const auto& [w, m, v] = state;
  const int64_t count = w.elements();
  const bool vectors = has_vectors(w) && has_vectors(gradient) && has_vectors(m) && has_vectors(v);
  const int64_t whole = vectors ? count / kWidth : 0, rest = count - whole * kWidth;
  if (whole > 0) {
    lamb_direction_kernel<<<blocks_for(whole), kThreads, 0, stream>>>(
        step, weight_decay, w.as<const float4>(), gradient.as<float4>(), m.as<float4>(),
        v.as<float4>(), whole);
    check_launch("lamb_direction_kernel");
  }
  if (rest == 0) return;
  const int64_t at = whole * kWidth;
  lamb_direction_elements_kernel<<<blocks_for(rest), kThreads, 0, stream>>>(
      step, weight_decay, w.as<const float>() + at, gradient.as<float>() + at, m.as<float>() + at,
      v.as<float>() + at, rest);
  check_launch("lamb_direction_elements_kernel");
}

void lamb_update(cudaStream_t stream, float rate, const Tensor& w, const Tensor& direction,
                 const Tensor& working) {
  const int64_t count = w.elements();
  const bool has_copy = working.data() != nullptr;
  const bool vectors =
      has_vectors(w) && has_vectors(direction) && (!has_copy || has_vectors(working));
  const int64_t whole = vectors ? count / kWidth : 0, rest = count - whole * kWidth;
  if (whole > 0) {
    const auto kernel = has_copy ? lamb_update_kernel<true> : lamb_update_kernel<false>;
    kernel<<<blocks_for(whole), kThreads, 0, stream>>>(
        rate, w.as<float4>(), direction.as<const float4>(), working.as<FourBf16>(), whole);
    check_launch("lamb_update_kernel");
  }
  if (rest == 0) return;
  const int64_t at = whole * kWidth;
  lamb_update_elements_kernel<<<blocks_for(rest), kThreads, 0, stream>>>(
      rate, w.as<float>() + at, direction.as<const float>() + at,
      has_copy ? working.as<__nv_bfloat16>() + at : nullptr, rest);
  check_launch("lamb_update_elements_kernel");
}

}  // namespace tandem::gpu
