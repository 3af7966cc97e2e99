// Attention of rows over the splits of their sequences, in bf16 on tensor cores: scores = keys x
// queries^T and sums = values^T x weights, with the query heads as the 8 columns of a product.
#pragma once

#include "kernels/cuda/paged.cuh"

namespace tandem::gpu {
namespace {

constexpr int kWarps = kPagedThreads / 32;
constexpr int kColumns = 8;                   // query heads of a block
constexpr int kWarpTokens = kSplit / kWarps;  // of one page
constexpr int kTokenTiles = kWarpTokens / 16;
static_assert(kPageTokens % kWarpTokens == 0);

/// Sums of one split for up to kColumns query heads of one key head; a block per split, key head
/// (or part of its group) and row, of which each warp has kWarpTokens tokens.
template <int kDim>
__global__ void __launch_bounds__(kPagedThreads)
    attend_tiles_kernel(const AttendParams<__nv_bfloat16> p) {
  constexpr int kChunks = kDim / 8;  // of 16 bytes, of a key
  extern __shared__ uint4 paged_memory[];
  let_next_start();
  wait_for_previous();
  SplitOfBlock block;
  if (!block.find<kColumns>(p)) return;
  const auto& [row, sequence, position, split, begin, first, end, kv_head, first_head, heads] =
      block;
  const int warp = int(threadIdx.x) / 32, lane = int(threadIdx.x) % 32;
  const int warp_begin = begin + warp * kWarpTokens;

  uint4* const keys = paged_memory + warp * kWarpTokens * kChunks;
  uint4* const values = keys + kSplit * kChunks;
  const bool reads = warp_begin < end && warp_begin + kWarpTokens > first;
  const int64_t warp_slot = reads ? p.lines.slot(sequence, warp_begin) : 0;
  const int64_t token_stride = int64_t(p.kv_heads) * p.head_dim;
  const int64_t base = warp_slot * token_stride + int64_t(kv_head) * p.head_dim;
  const auto copy_rows = [&](uint4* to, const __nv_bfloat16* from) {
#pragma unroll
    for (int i = 0; i < kChunks * kWarpTokens / 32; ++i) {
      const int token = (i * 32 + lane) / kChunks, chunk = (i * 32 + lane) % kChunks;
      const bool valid =
          warp_begin + token >= first && warp_begin + token < end && chunk * 8 < p.head_dim;
      copy_async(chunk_of<kChunks>(to, token, chunk),
                 from + (valid ? base + token * token_stride + chunk * 8 : 0), valid);
    }
    commit_copies();
  };
  copy_rows(keys, p.keys);
  copy_rows(values, p.values);

  // Columns are heads lane / 4 of the first product's second operand, and 2 * (lane % 4) and the
  // next of its result.
  uint32_t query[kDim / 16][2];
  const int query_head = lane / 4;
  const __nv_bfloat16* const q =
      p.q + row * p.q_stride + int64_t(first_head + query_head) * p.head_dim;
#pragma unroll
  for (int i = 0; i < kDim / 16; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int element = i * 16 + half * 8 + lane % 4 * 2;
      query[i][half] = query_head < heads && element < p.head_dim
                           ? *reinterpret_cast<const uint32_t*>(q + element)
                           : 0;
    }
  }

  wait_for_copies<1>();
  __syncwarp();
  const int matrix = lane / 8, matrix_row = lane % 8;  // whose address this lane passes
  float score[kTokenTiles][4];
  float top[2] = {-INFINITY, -INFINITY};
#pragma unroll
  for (int t = 0; t < kTokenTiles; ++t) {
#pragma unroll
    for (float& value : score[t]) value = 0;
#pragma unroll
    for (int i = 0; i < kDim / 16; ++i) {
      uint32_t a[4];
      load_tile(a,
                chunk_of<kChunks>(keys, t * 16 + matrix % 2 * 8 + matrix_row, i * 2 + matrix / 2));
      multiply_tile(score[t], a, query[i]);
    }
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int token = warp_begin + t * 16 + lane / 4 + e / 2 * 8;
      score[t][e] = token >= first && token < end ? score[t][e] * p.scale : -INFINITY;
      top[e % 2] = fmaxf(top[e % 2], score[t][e]);
    }
  }
  float total[2] = {0, 0};
  uint32_t weights[kTokenTiles][2];
#pragma unroll
  for (int c = 0; c < 2; ++c) top[c] = combine_rows(top[c], Larger{});
#pragma unroll
  for (int t = 0; t < kTokenTiles; ++t) {
    float weight[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const float of_column = top[e % 2];  // -infinity: this warp has no key
      weight[e] = of_column == -INFINITY ? 0 : exp2f(score[t][e] - of_column);
      total[e % 2] += weight[e];
    }
    weights[t][0] = transposed(packed(weight[0], weight[1]));
    weights[t][1] = transposed(packed(weight[2], weight[3]));
  }
#pragma unroll
  for (int c = 0; c < 2; ++c) total[c] = combine_rows(total[c], Plus{});

  wait_for_copies<0>();
  __syncwarp();
  float sum[kDim / 16][4];
#pragma unroll
  for (int i = 0; i < kDim / 16; ++i) {
#pragma unroll
    for (float& value : sum[i]) value = 0;
#pragma unroll
    for (int t = 0; t < kTokenTiles; ++t) {
      uint32_t a[4];
      load_transposed_tile(
          a, chunk_of<kChunks>(values, t * 16 + matrix / 2 * 8 + matrix_row, i * 2 + matrix % 2));
      multiply_tile(sum[i], a, weights[t]);
    }
  }

  // Sums of the warps, in their order: f32 [kWarps, kColumns, kDim] over the copies.
  __shared__ float tops[kWarps][kColumns], totals[kWarps][kColumns];
  if (lane < 4) {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      tops[warp][2 * lane + c] = top[c], totals[warp][2 * lane + c] = total[c];
    }
  }
  __syncthreads();
  auto* const warp_sums = reinterpret_cast<float*>(paged_memory);
  float keep[2];
#pragma unroll
  for (int c = 0; c < 2; ++c) {
    float of_block = -INFINITY;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) of_block = fmaxf(of_block, tops[w][lane % 4 * 2 + c]);
    keep[c] = exp2f(top[c] - of_block);
  }
#pragma unroll
  for (int i = 0; i < kDim / 16; ++i) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int head = lane % 4 * 2 + e % 2, element = i * 16 + lane / 4 + e / 2 * 8;
      warp_sums[(warp * kColumns + head) * kDim + element] = sum[i][e] * keep[e % 2];
    }
  }
  __syncthreads();
  for (int i = int(threadIdx.x); i < heads * kDim; i += kPagedThreads) {
    const int h = i / kDim, e = i % kDim;
    if (e >= p.head_dim) continue;
    float result = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) result += warp_sums[(w * kColumns + h) * kDim + e];
    p.sums[p.partial(row, first_head + h, split) * p.head_dim + e] = result;
  }
  if (int(threadIdx.x) < heads) {
    const int h = int(threadIdx.x);
    float of_block = -INFINITY, result = 0;
    for (int w = 0; w < kWarps; ++w) of_block = fmaxf(of_block, tops[w][h]);
    for (int w = 0; w < kWarps; ++w) result += totals[w][h] * exp2f(tops[w][h] - of_block);
    float* const scales = p.scales + p.partial(row, first_head + h, split) * 2;
    scales[0] = of_block, scales[1] = result;
  }
}

}  // namespace
}  // namespace tandem::gpu
