// Launch of the Hopper kernel of attention of few single rows over pages (few_attention.cu), in
// bf16 with heads of 64 or 128.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>

#include <cstdint>

#include "kernels/cuda/sm90/single_kernels.h"

namespace tandem::gpu::sm90 {

constexpr int kMaxFewCluster = 16;  ///< blocks of a cluster; more than 8 are not portable

struct FewParams {
  CUtensorMap keys, values;                      ///< boxes of a page
  const int32_t *sequences, *positions, *pages;  ///< as PagedRows
  int64_t pages_of_line;
  const __nv_bfloat16 *q, *k, *v;
  int64_t q_stride, k_stride, v_stride;
  __nv_bfloat16* out;
  int64_t out_stride;
  __nv_bfloat16 *cached_keys, *cached_values;  ///< of all pages
  const float *cos, *sin;                      ///< [positions, head_dim / 2]
  int heads, kv_heads, window;
  int cluster;       ///< blocks that share the keys of a row and key head: a power of two
  float scale_log2;  ///< of scores, to base 2
};

/// Clusters of this size that run at the same time on the current device; 0: none.
int resident_few_clusters(int head_dim, int cluster);

/// `appends`: q, k and v are as projected, and keys and values of the rows are written to their
/// pages; every row is the only one of its sequence. Else q is rotated, and the pages are complete.
void launch_few(int head_dim, bool appends, int rows, const FewParams& params, CUstream_st* stream);

}  // namespace tandem::gpu::sm90
