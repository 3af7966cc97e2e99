// Launches of the Hopper kernels of attention (attention_forward.cu, attention_backward.cu), of
// bf16 rows with heads of 64 or 128. q and k are rotated; dq and dk are of those before that.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>

#include <cstdint>

namespace tandem::gpu::sm90 {

constexpr int kForwardQueries = 128;  ///< of a block of the forward pass
constexpr double kLog2E = 1.4426950408889634;
constexpr int kQueryTile = 64;  ///< queries of a step of the backward pass
constexpr int kKeyTile = 128;   ///< keys of a step of the forward pass, or a block of the other

/// As AttentionMask.
struct Mask {
  int window;
  const int32_t* document_starts;
};

/// Rows [sequences * seq], heads next to each other.
struct ForwardParams {
  CUtensorMap q, k, v;  ///< boxes of 128 rows of a sequence
  Mask mask;
  __nv_bfloat16* out;
  int64_t stride;   ///< elements between rows of out
  float* log_sums;  ///< [sequences, heads, seq]
  int* ticket;      ///< of a block's next queries; 0 before and after a launch
  int sequences, seq, heads, kv_heads;
  float scale, scale_log2;  ///< of scores, and to base 2
  int sms;                  ///< of the GPU
};

void launch_forward(int head_dim, const ForwardParams& params, CUstream_st* stream);

/// f32 [seq, head_dim / 2]: of the angles that q and k were rotated by, as RopeTable's.
struct Angles {
  const float *cos, *sin;
  int half;  ///< head_dim / 2
};

/// Scratch rows are padded to whole tiles of queries.
struct BackwardParams {
  CUtensorMap q, k, v, dout;  ///< boxes of 64, or 128 of k and v, rows of a sequence
  float *log_sums, *deltas;   ///< [sequences, heads, padded]; log sums to base 2
  int* first_keys;            ///< [sequences, padded]
  int* ends;                  ///< [sequences, key_tiles]: of the tiles of queries that read keys
  float* dq;    ///< [sequences, heads, query_tiles], a tile in the accumulators' order
  int* added;   ///< [sequences, heads, query_tiles]: shares in dq
  int* ticket;  ///< of the next block
  Angles angles;
  __nv_bfloat16 *dk, *dv;
  int64_t stride;  ///< elements between rows of dq, dk and dv
  int sequences, seq, heads, kv_heads, key_tiles, query_tiles;
  float scale, scale_log2;  ///< of scores, and to base 2
};

/// Rows that the pass's other kernels read and write.
struct BackwardRows {
  const __nv_bfloat16 *out, *dout;
  int64_t stride;         ///< of out and dout
  const float* log_sums;  ///< [sequences, heads, seq]
  __nv_bfloat16* dq;
};

/// Sets everything that the backward kernel reads of its scratch memory (attention_rows.cu).
void prepare_backward(int head_dim, const BackwardParams& params, const Mask& mask,
                      const BackwardRows& rows, CUstream_st* stream);
/// Rotates the scratch memory's dq back, and rounds it.
void round_gradient(int head_dim, const BackwardParams& params, __nv_bfloat16* dq,
                    CUstream_st* stream);
/// The whole pass, these two included.
void launch_backward(int head_dim, const BackwardParams& params, const Mask& mask,
                     const BackwardRows& rows, CUstream_st* stream);

}  // namespace tandem::gpu::sm90
