// Launch of the Hopper kernel of attention of prompts over pages (chunk_attention.cu), of bf16 rows
// with heads of 64 or 128. Queries and keys are rotated, and the rows' keys and values in pages.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>

#include <cstdint>

namespace tandem::gpu::sm90 {

constexpr int kMaxChunks = 64;   ///< of a launch
constexpr int kChunkPage = 64;   ///< kPageTokens
constexpr int kChunkTile = 128;  ///< pairs of a token and a query head that a block multiplies

/// As PagedChunk.
struct Chunk {
  int first, rows;
};

/// A block's tile has kChunkTile / heads_of_tile tokens of a chunk, and so many query heads of one
/// key head.
struct ChunkParams {
  CUtensorMap q;                                 ///< boxes of a tile
  CUtensorMap keys, values;                      ///< boxes of a page
  const int32_t *sequences, *positions, *pages;  ///< as PagedRows
  int64_t pages_of_line;
  __nv_bfloat16* out;
  int64_t stride;  ///< elements between rows of out
  int* ticket;     ///< of a block's next tile; 0 before and after a launch
  int num_pages, heads, kv_heads, heads_of_tile, window;
  float scale_log2;  ///< of scores, to base 2
  int sms;           ///< of the GPU
  int num_chunks;
  Chunk chunks[kMaxChunks];
};

/// Query heads of a key head that a tile has: all of them where their tokens fill it.
constexpr int heads_of_tile(int group) {
  return kChunkTile % group <= kChunkTile / 16 ? group : 1;
}

void launch_chunks(int head_dim, const ChunkParams& params, CUstream_st* stream);

}  // namespace tandem::gpu::sm90
