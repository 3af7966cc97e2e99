// Kernels around that of the backward pass of attention on Hopper: which tiles read which, sums of
// a row, and what makes dq of its sums.
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
/// and infinity, so that weights are 0. A thread for each 16 bytes of a row of out.
template <int kHead>
__global__ void __launch_bounds__(kRowThreads) deltas_kernel(BackwardParams p, BackwardRows rows) {
  constexpr int kLanes = kHead / 8;  // of a head
  const int64_t thread = int64_t(blockIdx.x) * kRowThreads + threadIdx.x, of_head = thread / kLanes;
  const int lane = int(thread % kLanes), padded = p.query_tiles * kQueryTile;
  const int head = int(of_head % p.heads), row = int(of_head / p.heads % padded),
            sequence = int(of_head / p.heads / padded);
  if (sequence >= p.sequences) return;  // for all lanes of a head
  const int64_t to = (int64_t(sequence) * p.heads + head) * padded + row;
  if (row >= p.seq) {
    if (lane == 0) p.deltas[to] = 0, p.log_sums[to] = INFINITY;
    return;
  }
  const int64_t at =
      (int64_t(sequence) * p.seq + row) * rows.stride + head * kHead + lane * (kHead / kLanes);
  const uint4 out = *reinterpret_cast<const uint4*>(rows.out + at),
              dout = *reinterpret_cast<const uint4*>(rows.dout + at);
  float sum = 0;
  const auto add = [&](uint32_t x, uint32_t y) {
    const float2 a = Pair::unpack(x), b = Pair::unpack(y);
    sum += a.x * b.x + a.y * b.y;
  };
  add(out.x, dout.x), add(out.y, dout.y), add(out.z, dout.z), add(out.w, dout.w);
  const unsigned lanes = ((1u << kLanes) - 1) << (threadIdx.x % 32 / kLanes * kLanes);
#pragma unroll
  for (int other = kLanes / 2; other > 0; other /= 2) sum += __shfl_xor_sync(lanes, sum, other);
  if (lane != 0) return;
  p.deltas[to] = sum;
  p.log_sums[to] =
      rows.log_sums[(int64_t(sequence) * p.heads + head) * p.seq + row] * float(kLog2E);
}

/// Rotates dq back and rounds it. A thread reads four vectors, 8 columns apart, of each half of the
/// columns, in the order of accumulators, and writes 8 columns next to each other.
template <int kHead>
__global__ void __launch_bounds__(kRowThreads) round_kernel(BackwardParams p, __nv_bfloat16* dq) {
  static_assert(kGroups == 2, "a group has a half of the columns");
  constexpr int kVectors = kQueryTile * kHead / kGroups / 4;  // of a tile's half
  const int64_t thread = int64_t(blockIdx.x) * kRowThreads + threadIdx.x,
                tile = thread / (kVectors / 4);
  if (tile >= int64_t(p.sequences) * p.heads * p.query_tiles) return;  // a whole warp
  const int head = int(tile % p.heads), queries = int(tile / p.heads % p.query_tiles),
            sequence = int(tile / p.heads / p.query_tiles);
  const int lane = int(thread % 32), warp = int(thread / 32 % 4),
            block = int(thread / 128 % (kHead / 64)) * 4;  // of 8 columns
  const int row = queries * kQueryTile + warp * 16 + lane / 4;
  const float* const values =
      p.dq +
      ((int64_t(sequence) * p.heads + head) * p.query_tiles + queries) * (kQueryTile * kHead);
  const auto* const from = reinterpret_cast<const float4*>(values) + block * 128 + warp * 32 + lane;
  uint32_t lows[2][4], highs[2][4];  // of the row, and of that 8 later
  for_each<4>([&](auto i) {
    const float4 low = from[i * 128], high = from[i * 128 + kVectors];
    const int column = (block + i) * 8 + lane % 4 * 2;
    const auto turn = [&](int half, float2 a, float2 b) {
      BackRotation(p.angles, min(row + 8 * half, p.seq - 1), column).apply(&a.x, &b.x);
      lows[half][i] = Pair::pack(a.x * p.scale, a.y * p.scale);
      highs[half][i] = Pair::pack(b.x * p.scale, b.y * p.scale);
    };
    turn(0, {low.x, low.y}, {high.x, high.y});
    turn(1, {low.z, low.w}, {high.z, high.w});
  });
  for_each<2>([&](auto half) {
    transpose(lows[half], lane);
    transpose(highs[half], lane);
    const int at = row + 8 * half;
    if (at >= p.seq) return;
    __nv_bfloat16* const to =
        dq + (int64_t(sequence) * p.seq + at) * p.stride + head * kHead + (block + lane % 4) * 8;
    const auto vector = [](const uint32_t(&w)[4]) { return make_uint4(w[0], w[1], w[2], w[3]); };
    *reinterpret_cast<uint4*>(to) = vector(lows[half]);
    *reinterpret_cast<uint4*>(to + kHead / 2) = vector(highs[half]);
  });
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
  deltas_kernel<kHead>
      <<<blocks_of(queries * p.heads * (kHead / 8)), kRowThreads, 0, stream>>>(p, rows);
  check_launch("attention_backward");
}

template <int kHead>
void round(const BackwardParams& p, __nv_bfloat16* dq, cudaStream_t stream) {
  const int64_t tiles = int64_t(p.sequences) * p.heads * p.query_tiles;
  round_kernel<kHead>
      <<<blocks_of(tiles * (kQueryTile * kHead / 32)), kRowThreads, 0, stream>>>(p, dq);
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
