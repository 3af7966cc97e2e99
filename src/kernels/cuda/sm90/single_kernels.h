// Launch of the Hopper kernel of attention of single rows over pages (single_attention.cu), in bf16
// with heads of 64 or 128. Queries and keys are rotated, and the rows' keys and values in pages.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>

#include <cstdint>

namespace tandem::gpu::sm90 {

constexpr int kSinglePage = 64;   ///< kPageTokens
constexpr int kSingleHeads = 8;   ///< max query heads of a block, all of one key head
constexpr int kSingleRows = 512;  ///< max rows of a launch
constexpr int kSplitPages = 16;   ///< pages of a split, which begins at a multiple of them
constexpr int kSplitKeys = kSplitPages * kSinglePage;

/// Max splits of rows at positions below `tokens`.
constexpr int64_t max_splits(int64_t tokens) {
  return (tokens - 1) / kSplitKeys + 1;
}
/// Blocks of a key head's query heads.
constexpr int blocks_of_group(int group) {
  return (group + kSingleHeads - 1) / kSingleHeads;
}

struct SingleParams {
  CUtensorMap keys, values;                      ///< boxes of a page
  const int32_t *sequences, *positions, *pages;  ///< as PagedRows
  int64_t pages_of_line;
  const __nv_bfloat16* q;
  int64_t q_stride;
  __nv_bfloat16* out;
  int64_t stride;
  float *sums, *scales;  ///< [rows, heads, splits, head_dim] and [rows, heads, splits, 2]
  int* counters;         ///< [rows, key heads, blocks of a group]; 0 before and after a launch
  int rows, heads, kv_heads, window;
  int splits;        ///< max of a row
  float scale_log2;  ///< of scores, to base 2
  int sms;           ///< of the GPU
};

void launch_singles(int head_dim, const SingleParams& params, CUstream_st* stream);

}  // namespace tandem::gpu::sm90
