// Weighted sum of a row's expert results, as read by the kernels that compute it.
#pragma once

#include "core/cuda/element.cuh"

namespace tandem::gpu {

/// A warp's next choices of a row, one per lane: position of its result, -1: none.
struct LaneRouting {
  int from = -1;
  float weight = 1;
  __device__ static LaneRouting of(const int32_t* position, const float* weights, int routings) {
    const int lane = int(threadIdx.x) % 32;
    if (lane >= routings) return {};
    return {__ldg(position + lane), weights ? __ldg(weights + lane) : 1.f};
  }
};

/// Adds 16-byte vectors of the sum over k of weights[k] x y[position[k]], over those with a
/// position, to `sum` in f32 in this order, by a warp: several vectors of a lane at once, from
/// `vec` on, `apart` from each other, skipping those at or after `end`. Without `weights` each
/// is 1. Loads of two terms are in flight, for all of these vectors. `first`: the row's first
/// choices, which the warp has already read.
template <typename T, int kVecs>
__device__ void add_weighted_vecs(float (&sum)[kVecs][Vec<T>::kElements], const Vec<T>* y,
                                  int64_t vecs, int64_t vec, int apart, int64_t end,
                                  const LaneRouting& first, const int32_t* position,
                                  const float* weights, int top_k) {
  LaneRouting routing_idx = first;
  for (int done = 0;;) {
    unsigned there = __ballot_sync(~0u, routing_idx.from >= 0);
    while (there != 0) {
      Vec<T> terms[2][kVecs];
      float factor[2];
      bool is_term[2];
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        is_term[j] = there != 0;
        if (!is_term[j]) continue;
        const int of = __ffs(int(there)) - 1;
        there &= there - 1;
        factor[j] = __shfl_sync(~0u, routing_idx.weight, of);
        const Vec<T>* const row = y + __shfl_sync(~0u, routing_idx.from, of) * vecs;
#pragma unroll
        for (int i = 0; i < kVecs; ++i) {
          if (vec + i * apart < end) terms[j][i] = row[vec + i * apart];
        }
      }
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        if (!is_term[j]) continue;
#pragma unroll
        for (int i = 0; i < kVecs; ++i) {
          if (vec + i * apart >= end) continue;
#pragma unroll
          for (int e = 0; e < Vec<T>::kElements; ++e) {
            sum[i][e] = fmaf(factor[j], to_float(terms[j][i].at[e]), sum[i][e]);
          }
        }
      }
    }
    done += 32;
    if (done >= top_k) return;
    routing_idx =
        LaneRouting::of(position + done, weights ? weights + done : nullptr, top_k - done);
  }
}

}  // namespace tandem::gpu
