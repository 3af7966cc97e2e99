// Attention of rows over the splits of their sequences, in f32 on CUDA cores.
#pragma once

#include <algorithm>

#include "kernels/cuda/paged.cuh"

namespace tandem::gpu {
namespace {

/// Threads that share a token, tokens that a block reads together, and the steps of a split.
template <int kDim, int kGroup>
struct PagedTile {
  static constexpr int kElements = 4;
  static constexpr int kLanes = kDim / kElements;
  static constexpr int kSets = std::min(kPagedThreads / kLanes, kSplit);
  static constexpr int kThreads = kSets * kLanes;
  static constexpr int kSteps = kSplit / kSets;
  /// Steps whose scores are registers at the same time.
  static constexpr int kAtOnce = std::min(4, kSteps);
  static constexpr int kRounds = kSteps / kAtOnce;
};

/// Sums of one split for kGroup query heads of one key head, in f32; a block per split, key head
/// (or part of its group) and row. Every thread copies only what it reads itself.
template <int kDim, int kGroup>
__global__ void __launch_bounds__(kPagedThreads) attend_kernel(const AttendParams<float> p) {
  using Tile = PagedTile<kDim, kGroup>;
  constexpr int kElements = Tile::kElements, kSets = Tile::kSets, kAtOnce = Tile::kAtOnce;
  extern __shared__ uint4 paged_memory[];
  let_next_start();
  wait_for_previous();
  SplitOfBlock block;
  if (!block.find<kGroup>(p)) return;
  const auto& [row, sequence, position, split, begin, first, end, kv_head, first_head, heads] =
      block;
  const int set = int(threadIdx.x) / Tile::kLanes, lane = int(threadIdx.x) % Tile::kLanes;
  const int element = lane * kElements;
  const bool in_head = element < p.head_dim;

  // Tokens set, set + kSets, ... of the split: 2 x 16 bytes of this thread each.
  auto* const copies = paged_memory + threadIdx.x;
  const auto copy_of = [&](int step, int which) {
    return copies + (step * 2 + which) * Tile::kThreads;
  };
#pragma unroll
  for (int step = 0; step < Tile::kSteps; ++step) {
    const int token = begin + step * kSets + set;
    const bool valid = in_head && token >= first && token < end;
    const int64_t slot = p.lines.slot(sequence, valid ? token : first);
    const int64_t offset = (slot * p.kv_heads + kv_head) * p.head_dim + (in_head ? element : 0);
    copy_async(copy_of(step, 0), p.keys + offset, valid);
    copy_async(copy_of(step, 1), p.values + offset, valid);
    if (step % kAtOnce == kAtOnce - 1) commit_copies();
  }

  float query[kGroup][kElements];
#pragma unroll
  for (int h = 0; h < kGroup; ++h) {
    Vec<float> loaded{};
    if (h < heads && in_head) {
      loaded = *reinterpret_cast<const Vec<float>*>(p.q + row * p.q_stride +
                                                    int64_t(first_head + h) * p.head_dim + element);
    }
#pragma unroll
    for (int e = 0; e < kElements; ++e) query[h][e] = loaded.at[e] * p.scale;
  }
  float largest[kGroup], total[kGroup], sum[kGroup][kElements];
#pragma unroll
  for (int h = 0; h < kGroup; ++h) {
    largest[h] = -INFINITY, total[h] = 0;
#pragma unroll
    for (int e = 0; e < kElements; ++e) sum[h][e] = 0;
  }

#pragma unroll
  for (int round = 0; round < Tile::kRounds; ++round) {
    // Groups of copies end in order; the number that may be pending is a constant of the round.
    const int pending = std::min(Tile::kRounds - 1 - round, 3);
    if (pending == 0) wait_for_copies<0>();
    if (pending == 1) wait_for_copies<1>();
    if (pending == 2) wait_for_copies<2>();
    if (pending == 3) wait_for_copies<3>();
    float score[kAtOnce][kGroup];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int step = round * kAtOnce + i, token = begin + step * kSets + set;
      const auto key = *reinterpret_cast<const Vec<float>*>(copy_of(step, 0));
#pragma unroll
      for (int h = 0; h < kGroup; ++h) {
        float dot = 0;
#pragma unroll
        for (int e = 0; e < kElements; ++e) dot = fmaf(query[h][e], key.at[e], dot);
#pragma unroll
        for (int offset = Tile::kLanes / 2; offset; offset /= 2) {
          dot += __shfl_xor_sync(~0u, dot, offset);
        }
        score[i][h] = token >= first && token < end ? dot : -INFINITY;
      }
    }
#pragma unroll
    for (int h = 0; h < kGroup; ++h) {
      float top = largest[h];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) top = fmaxf(top, score[i][h]);
      const float base = top == -INFINITY ? 0 : top;  // no key yet
      const float keep = exp2f(largest[h] - base);
      largest[h] = top;
      total[h] *= keep;
#pragma unroll
      for (int e = 0; e < kElements; ++e) sum[h][e] *= keep;
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        score[i][h] = exp2f(score[i][h] - base);
        total[h] += score[i][h];
      }
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const auto value = *reinterpret_cast<const Vec<float>*>(copy_of(round * kAtOnce + i, 1));
#pragma unroll
      for (int e = 0; e < kElements; ++e) {
#pragma unroll
        for (int h = 0; h < kGroup; ++h) sum[h][e] = fmaf(score[i][h], value.at[e], sum[h][e]);
      }
    }
  }

  // Sums of the sets, in their order: f32 [kSets, kGroup, kDim] over the copies, then the maxima.
  __shared__ float tops[kSets][kGroup], totals[kSets][kGroup];
  if (lane == 0) {
#pragma unroll
    for (int h = 0; h < kGroup; ++h) tops[set][h] = largest[h], totals[set][h] = total[h];
  }
  __syncthreads();
  auto* const set_sums = reinterpret_cast<float*>(paged_memory);
#pragma unroll
  for (int h = 0; h < kGroup; ++h) {
    float top = tops[0][h];
    for (int s = 1; s < kSets; ++s) top = fmaxf(top, tops[s][h]);
    const float keep = exp2f(largest[h] - top);
#pragma unroll
    for (int e = 0; e < kElements; ++e) {
      set_sums[(set * kGroup + h) * kDim + element + e] = sum[h][e] * keep;
    }
  }
  __syncthreads();
  for (int i = int(threadIdx.x); i < kGroup * kDim; i += Tile::kThreads) {
    const int h = i / kDim, e = i % kDim;
    if (h >= heads || e >= p.head_dim) continue;
    float result = 0;
    for (int s = 0; s < kSets; ++s) result += set_sums[(s * kGroup + h) * kDim + e];
    p.sums[p.partial(row, first_head + h, split) * p.head_dim + e] = result;
  }
  if (int(threadIdx.x) < heads) {
    const int h = int(threadIdx.x);
    float top = tops[0][h];
    for (int s = 1; s < kSets; ++s) top = fmaxf(top, tops[s][h]);
    float result = 0;
    for (int s = 0; s < kSets; ++s) result += totals[s][h] * exp2f(tops[s][h] - top);
    float* const scales = p.scales + p.partial(row, first_head + h, split) * 2;
    scales[0] = top, scales[1] = result;
  }
}

}  // namespace
}  // namespace tandem::gpu
