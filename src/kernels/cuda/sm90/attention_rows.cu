// Kernels around that of the backward pass of attention on Hopper: which tiles read which, sums of
// a row, and the rounding of dq.
#include <cuda_bf16.h>

#include <algorithm>

#include "core/cuda/check.h"
#include "core/cuda/load_module.cuh"
#include "kernels/cuda/sm90/attention.cuh"
#include "kernels/cuda/sm90/attention_kernels.h"

namespace tandem::gpu::sm90 {
namespace {

constexpr int kRowThreads = 256;

/// Clears counters; a thread for each tile of queries of each head.
__global__ void __launch_bounds__(kRowThreads) plan_kernel(BackwardParams p, Mask mask) {
  const int64_t thread = int64_t(blockIdx.x) * kRowThreads + threadIdx.x;
  if (thread == 0) *p.ticket = 0;
  if (thread < int64_t(p.sequences) * p.heads * p.query_tiles) p.added[thread] = 0;
  if (thread < int64_t(p.sequences) * p.query_tiles * kQueryTile) {
    const int query = int(thread % (p.query_tiles * kQueryTile));
    p.first_keys[thread] =
        first_key(mask, p.seq, int(thread / (p.query_tiles * kQueryTile)), query);
  }
  if (thread < int64_t(p.sequences) * p.key_tiles) {
    const int tile = int(thread % p.key_tiles), sequence = int(thread / p.key_tiles);
    int first = tile * (kKeyTile / kQueryTile) + 1, last = p.query_tiles;
    while (first < last) {  // the end is between these
      const int queries = (first + last) / 2;
      if (first_key(mask, p.seq, sequence, queries * kQueryTile) < (tile + 1) * kKeyTile) {
        first = queries + 1;
      } else {
        last = queries;
      }
    }
    p.ends[thread] = first;
  }
}

/// deltas = the sum of out x dout over a head, and the log sums to base 2; beyond the sequence 0
/// and infinity, so that weights are 0. A warp for each row of each head.
template <int kHead>
__global__ void __launch_bounds__(kRowThreads) deltas_kernel(BackwardParams p, BackwardRows rows) {
  const int64_t warp = (int64_t(blockIdx.x) * kRowThreads + threadIdx.x) / 32;
  const int lane = int(threadIdx.x) % 32, padded = p.query_tiles * kQueryTile;
  if (warp >= int64_t(p.sequences) * padded * p.heads) return;
  const int head = int(warp % p.heads), row = int(warp / p.heads % padded),
            sequence = int(warp / p.heads / padded);
  const int64_t to = (int64_t(sequence) * p.heads + head) * padded + row;
  if (row >= p.seq) {
    if (lane == 0) p.deltas[to] = 0, p.log_sums[to] = INFINITY;
    return;
  }
  constexpr int kPairs = kHead / 64;
  const int64_t at = (int64_t(sequence) * p.seq + row) * rows.stride + head * kHead;
  float sum = 0;
#pragma unroll
  for (int i = 0; i < kPairs; ++i) {
    const int64_t column = at + 2 * (lane * kPairs + i);
    const float2 a = Pair::unpack(*reinterpret_cast<const uint32_t*>(rows.out + column)),
                 b = Pair::unpack(*reinterpret_cast<const uint32_t*>(rows.dout + column));
    sum += a.x * b.x + a.y * b.y;
  }
#pragma unroll
  for (int other = 16; other > 0; other /= 2) sum += __shfl_xor_sync(~0u, sum, other);
  if (lane != 0) return;
  p.deltas[to] = sum;
  p.log_sums[to] =
      rows.log_sums[(int64_t(sequence) * p.heads + head) * p.seq + row] * float(kLog2E);
}

/// Rounds dq. A thread has four values of each half of the columns, in the order of accumulators.
template <int kHead>
__global__ void __launch_bounds__(kRowThreads) round_kernel(BackwardParams p, __nv_bfloat16* dq) {
  constexpr int kVectors = kQueryTile * kHead / kGroups / 4;  // of a tile's half
  const int64_t thread = int64_t(blockIdx.x) * kRowThreads + threadIdx.x;
  if (thread >= int64_t(p.sequences) * p.heads * p.query_tiles * kVectors) return;
  const int64_t tile = thread / kVectors;
  const int vector = int(thread % kVectors), lane = vector % 32;
  const int queries = int(tile % p.query_tiles), head = int(tile / p.query_tiles % p.heads),
            sequence = int(tile / p.query_tiles / p.heads);
  const int row = queries * kQueryTile + vector / 32 % 4 * 16 + lane / 4;
  const int column = head * kHead + vector / 128 * 8 + lane % 4 * 2;
  const auto* from = reinterpret_cast<const float4*>(p.dq + tile * (kQueryTile * kHead)) + vector;
#pragma unroll
  for (int half = 0; half < kGroups; ++half) {
    const float4 x = from[half * kVectors];
    __nv_bfloat16* const to =
        dq + (int64_t(sequence) * p.seq + row) * p.stride + column + half * (kHead / kGroups);
    if (row < p.seq) *reinterpret_cast<uint32_t*>(to) = Pair::pack(x.x * p.scale, x.y * p.scale);
    if (row + 8 < p.seq) {
      *reinterpret_cast<uint32_t*>(to + 8 * p.stride) = Pair::pack(x.z * p.scale, x.w * p.scale);
    }
  }
}

int blocks_of(int64_t threads) {
  return int((threads + kRowThreads - 1) / kRowThreads);
}

template <int kHead>
void prepare(const BackwardParams& p, const Mask& mask, const BackwardRows& rows,
             cudaStream_t stream) {
  const int64_t tiles = int64_t(p.sequences) * p.heads * p.query_tiles;
  const int64_t queries = int64_t(p.sequences) * p.query_tiles * kQueryTile;
  plan_kernel<<<blocks_of(std::max(tiles, queries)), kRowThreads, 0, stream>>>(p, mask);
  check_launch("attention_backward");
  deltas_kernel<kHead><<<blocks_of(queries * p.heads * 32), kRowThreads, 0, stream>>>(p, rows);
  check_launch("attention_backward");
}

template <int kHead>
void round(const BackwardParams& p, __nv_bfloat16* dq, cudaStream_t stream) {
  const int64_t tiles = int64_t(p.sequences) * p.heads * p.query_tiles;
  round_kernel<kHead>
      <<<blocks_of(tiles * (kQueryTile * kHead / 8)), kRowThreads, 0, stream>>>(p, dq);
  check_launch("attention_backward");
}

}  // namespace

void prepare_backward(int head_dim, const BackwardParams& params, const Mask& mask,
                      const BackwardRows& rows, CUstream_st* stream) {
  if (head_dim == 64) return prepare<64>(params, mask, rows, stream);
  prepare<128>(params, mask, rows, stream);
}

void round_gradient(int head_dim, const BackwardParams& params, __nv_bfloat16* dq,
                    CUstream_st* stream) {
  if (head_dim == 64) return round<64>(params, dq, stream);
  round<128>(params, dq, stream);
}

}  // namespace tandem::gpu::sm90
