// A row's weighted results of its experts, as the kernels that sum them read them.
#pragma once

#include "core/cuda/element.cuh"

namespace tandem::gpu {

/// Pack `pack` of sum over k of weights[k] x y[place[k]], over those that have a place, added to
/// `sum` in f32 in this order. Without `weights` each is 1. The sources of up to four terms are
/// under way at a time.
template <typename T>
__device__ void add_weighted(float (&sum)[Pack<T>::kElements], const Pack<T>* y, int64_t packs,
                             int64_t pack, const int32_t* place, const float* weights, int top_k) {
  constexpr int kAtATime = 4;
  for (int k = 0; k < top_k; k += kAtATime) {
    Pack<T> terms[kAtATime];
    float weight[kAtATime];
    bool there[kAtATime];
#pragma unroll
    for (int j = 0; j < kAtATime; ++j) {
      const int from = k + j < top_k ? __ldg(place + k + j) : -1;
      there[j] = from >= 0;
      if (!there[j]) continue;
      weight[j] = weights ? __ldg(weights + k + j) : 1.f;
      terms[j] = y[from * packs + pack];
    }
#pragma unroll
    for (int j = 0; j < kAtATime; ++j) {
      if (!there[j]) continue;
#pragma unroll
      for (int e = 0; e < Pack<T>::kElements; ++e) {
        sum[e] = fmaf(weight[j], to_float(terms[j].at[e]), sum[e]);
      }
    }
  }
}

}  // namespace tandem::gpu
