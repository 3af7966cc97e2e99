// Attention of a prompt's chunk over its sequence's pages, in bf16 on tensor cores. A block has
// kChunkRows pairs of a token and a query head of one key head, and reads pages in order, two of
// them at a time in shared memory. A row's bits do not depend on the chunk that it is in.
#pragma once

#include "kernels/cuda/paged.cuh"

namespace tandem::gpu {
namespace {

constexpr int kChunkRows = 64;
constexpr int kChunkThreads = kChunkRows / 16 * 32;
constexpr int kPage = int(kPageTokens);

/// Rows of a PagedChunk, as the kernel takes them.
struct ChunkRows {
  int64_t first_row;
  int rows;
};

/// Block (tile, key head). Of a warp, lane / 4 is the first of two rows, 8 apart, of each product.
template <int kDim>
__global__ void __launch_bounds__(kChunkThreads)
    attend_chunk_kernel(const AttendParams<__nv_bfloat16> p, ChunkRows chunk) {
  constexpr int kChunks = kDim / 8, kSteps = kDim / 16, kKeyTiles = kPage / 8;
  extern __shared__ uint4 paged_memory[];
  uint4* const keys = paged_memory;
  uint4* const values = keys + 2 * kPage * kChunks;
  const int sequence = p.lines.sequences[chunk.first_row];
  if (sequence < 0) return;
  const int first_position = p.lines.positions[chunk.first_row];
  const int kv_head = int(blockIdx.y);
  const int warp = int(threadIdx.x) / 32, lane = int(threadIdx.x) % 32;
  // Later tiles read more keys: they are first.
  const int tile = (int(gridDim.x) - 1 - int(blockIdx.x)) * kChunkRows;
  const int last_token = min(chunk.rows - 1, (tile + kChunkRows - 1) / p.group);
  const int first_page = p.first_key(first_position + tile / p.group) / kPage;
  const int end_page = (first_position + last_token) / kPage + 1;

  const int64_t token_stride = int64_t(p.kv_heads) * p.head_dim;
  const auto copy_page = [&](int page) {
    const int64_t base =
        p.lines.slot(sequence, page * kPage) * token_stride + int64_t(kv_head) * p.head_dim;
    const int known = min(kPage, first_position + chunk.rows - page * kPage);
    for (uint4* const to : {keys, values}) {
      const __nv_bfloat16* const from = to == keys ? p.keys : p.values;
#pragma unroll
      for (int i = 0; i < kChunks * kPage / kChunkThreads; ++i) {
        const int index = i * kChunkThreads + int(threadIdx.x);
        const int token = index / kChunks, c = index % kChunks;
        const bool valid = token < known && c * 8 < p.head_dim;
        copy_async(chunk_of<kChunks>(to + page % 2 * kPage * kChunks, token, c),
                   from + (valid ? base + token * token_stride + c * 8 : 0), valid);
      }
    }
    commit_copies();
  };
  copy_page(first_page);

  int64_t head_of_row[2], row_of[2];
  int position[2];
  bool valid_row[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int index = tile + warp * 16 + lane / 4 + r * 8, token = index / p.group;
    valid_row[r] = token < chunk.rows;
    row_of[r] = chunk.first_row + min(token, chunk.rows - 1);
    head_of_row[r] = int64_t(kv_head) * p.group + index % p.group;
    position[r] = first_position + token;
  }
  uint32_t query[kSteps][4];
#pragma unroll
  for (int i = 0; i < kSteps; ++i) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int r = e % 2, element = i * 16 + e / 2 * 8 + lane % 4 * 2;
      query[i][e] = valid_row[r] && element < p.head_dim
                        ? *reinterpret_cast<const uint32_t*>(p.q + row_of[r] * p.q_stride +
                                                             head_of_row[r] * p.head_dim + element)
                        : 0;
    }
  }
  float sum[kDim / 8][4], total[2] = {0, 0}, top[2] = {-INFINITY, -INFINITY};
#pragma unroll
  for (int i = 0; i < kDim / 8; ++i) {
#pragma unroll
    for (float& value : sum[i]) value = 0;
  }

  const int matrix = lane / 8, matrix_row = lane % 8;  // whose address this lane passes
  const int first_row_key = p.first_key(first_position + last_token);  // none reads fewer
  for (int page = first_page; page < end_page; ++page) {
    if (page + 1 < end_page) {
      copy_page(page + 1);
      wait_for_copies<1>();
    } else {
      wait_for_copies<0>();
    }
    __syncthreads();
    uint4* const page_keys = keys + page % 2 * kPage * kChunks;
    uint4* const page_values = values + page % 2 * kPage * kChunks;
    float score[kKeyTiles][4];
#pragma unroll
    for (int t = 0; t < kKeyTiles; ++t) {
#pragma unroll
      for (float& value : score[t]) value = 0;
    }
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
#pragma unroll
      for (int t = 0; t < kKeyTiles; t += 2) {
        uint32_t b[4];
        load_tile(b, chunk_of<kChunks>(page_keys, t * 8 + matrix / 2 * 8 + matrix_row,
                                       i * 2 + matrix % 2));
        multiply_tile(score[t], query[i], {b[0], b[1]});
        multiply_tile(score[t + 1], query[i], {b[2], b[3]});
      }
    }
    const bool masked =
        (page + 1) * kPage > first_position + tile / p.group || page * kPage < first_row_key;
#pragma unroll
    for (int t = 0; t < kKeyTiles; ++t) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        score[t][e] *= p.scale;
        if (!masked) continue;
        const int key = page * kPage + t * 8 + lane % 4 * 2 + e % 2;
        if (key > position[e / 2] || key < p.first_key(position[e / 2])) score[t][e] = -INFINITY;
      }
    }
    float keep[2], base[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float largest = top[r];
#pragma unroll
      for (int t = 0; t < kKeyTiles; ++t) {
        largest = fmaxf(largest, fmaxf(score[t][2 * r], score[t][2 * r + 1]));
      }
      largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
      largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
      base[r] = largest == -INFINITY ? 0 : largest;  // no key yet
      keep[r] = exp2f(top[r] - base[r]);
      top[r] = largest;
      total[r] *= keep[r];
    }
#pragma unroll
    for (int i = 0; i < kDim / 8; ++i) {
#pragma unroll
      for (int e = 0; e < 4; ++e) sum[i][e] *= keep[e / 2];
    }
#pragma unroll
    for (int t = 0; t < kKeyTiles; t += 2) {
      float weight[2][4];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          weight[half][e] = exp2f(score[t + half][e] - base[e / 2]);
          total[e / 2] += weight[half][e];
        }
      }
      const uint32_t a[4] = {packed(weight[0][0], weight[0][1]), packed(weight[0][2], weight[0][3]),
                             packed(weight[1][0], weight[1][1]),
                             packed(weight[1][2], weight[1][3])};
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
        uint32_t b[4];
        load_transposed_tile(b, chunk_of<kChunks>(page_values, t * 8 + matrix % 2 * 8 + matrix_row,
                                                  i * 2 + matrix / 2));
        multiply_tile(sum[2 * i], a, {b[0], b[1]});
        multiply_tile(sum[2 * i + 1], a, {b[2], b[3]});
      }
    }
    __syncthreads();  // the page's memory is copied over
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    total[r] += __shfl_xor_sync(~0u, total[r], 1);
    total[r] += __shfl_xor_sync(~0u, total[r], 2);
    if (!valid_row[r]) continue;
    const float scale = 1 / total[r];
    __nv_bfloat16* const out = p.out + row_of[r] * p.out_stride + head_of_row[r] * p.head_dim;
#pragma unroll
    for (int i = 0; i < kDim / 8; ++i) {
      const int element = i * 8 + lane % 4 * 2;
      if (element >= p.head_dim) continue;
      *reinterpret_cast<uint32_t*>(out + element) =
          packed(sum[i][2 * r] * scale, sum[i][2 * r + 1] * scale);
    }
  }
}

}  // namespace
}  // namespace tandem::gpu
