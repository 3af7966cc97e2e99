// Attention with f32 arithmetic on CUDA cores. A block owns a tile of queries (forward, dq) or of
// keys (dk, dv) and visits the tiles of the other side in a fixed order; scores exist only for a
// pair of tiles, in registers and shared memory. Tiles are f32 in shared memory, rotated while
// being loaded, and 0 beyond the real head size and sequence.
#include <algorithm>
#include <cmath>
#include <string>
#include <type_traits>

#include "core/cuda/check.h"
#include "core/cuda/element.cuh"
#include "core/cuda/load_module.cuh"
#include "kernels/cuda/kernels.h"

namespace tandem::gpu {
namespace {

constexpr int kMaxHead = 128;
constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr int kLanes = 16;  // threads next to each other in a row of scores: 16 x 16 threads
constexpr int kTile = 64;   // rows that a block owns; also keys of a step of the forward pass
constexpr int kStep = 32;   // rows of the other side of a step of the backward pass
constexpr int kOwned = 4;   // owned rows of a thread
constexpr int kPad = 4;     // floats after a row: 16-byte accesses to 8 rows use all banks
constexpr int kBlocksPerSm = 2;

template <typename T>
struct Rows {
  T* data;
  int64_t stride;
  __device__ T* at(int64_t row, int64_t column) const { return data + row * stride + column; }
};

template <typename T>
struct Params {
  int sequences, seq, heads, kv_heads, half;  // half: of head_dim
  float scale;                                // of queries
  const float *cos, *sin;                     // [seq, half]
  Rows<const T> q, k, v;
  float* log_sums;
  Rows<T> out;         // written by the forward pass
  Rows<const T> dout;  // this and the rest: backward pass only
  Rows<T> dq, dk, dv;
};

template <int kCount>
struct alignas(kCount * sizeof(float)) Floats {
  float at[kCount];
};
template <int kCount>
__device__ Floats<kCount> load(const float* from) {
  return *reinterpret_cast<const Floats<kCount>*>(from);
}

__device__ int thread_row() {
  return int(threadIdx.x) / kLanes;
}
__device__ int thread_lane() {
  return int(threadIdx.x) % kLanes;
}

/// Columns of a thread in an accumulator of kHead columns: vectors, kLanes vectors apart.
template <int kHead>
struct Columns {
  static constexpr int kCount = kHead / kLanes, kVector = kCount < 4 ? kCount : 4;
  static __device__ int at(int c) {
    return (c / kVector * kLanes + thread_lane()) * kVector + c % kVector;
  }
};

template <int kHead>
constexpr int kStride = kHead + kPad;

template <int kHead>
using Accumulators = float[kOwned][Columns<kHead>::kCount];

/// Calls body(row, column) for each row of a tile and each column below `columns`, at most
/// kColumns: a warp per row.
template <int kTileRows, int kColumns, typename Body>
__device__ void for_each_element(int columns, const Body& body) {
  const int warp = int(threadIdx.x) / 32, lane = int(threadIdx.x) % 32;
#pragma unroll 2
  for (int row = warp; row < kTileRows; row += kWarps) {
#pragma unroll
    for (int first = 0; first < kColumns; first += 32) {
      if (first + lane < columns) body(row, first + lane);
    }
  }
}

/// Positions [position, position + count) of a sequence, and one head.
struct Slice {
  int64_t row, column;  // of the first position's head in the tensor
  int position, count;
};

/// tile = scale x rotate(from), 0 for rows beyond the slice.
template <int kHead, int kTileRows, typename T>
__device__ void load_rotated(const Params<T>& p, const Rows<const T>& from, const Slice& slice,
                             float scale, float* tile) {
  for_each_element<kTileRows, kHead / 2>(p.half, [&](int row, int i) {
    float low = 0, high = 0, cos = 0, sin = 0;
    if (row < slice.count) {
      const T* x = from.at(slice.row + row, slice.column + i);
      const int64_t angle = int64_t(slice.position + row) * p.half + i;
      low = to_float(x[0]), high = to_float(x[p.half]);
      cos = p.cos[angle], sin = p.sin[angle];
    }
    tile[row * kStride<kHead> + i] = scale * (low * cos - high * sin);
    tile[row * kStride<kHead> + i + p.half] = scale * (high * cos + low * sin);
  });
}

template <int kHead, int kTileRows, typename T>
__device__ void load_rows(const Params<T>& p, const Rows<const T>& from, const Slice& slice,
                          float* tile) {
  for_each_element<kTileRows, kHead>(2 * p.half, [&](int row, int i) {
    tile[row * kStride<kHead> + i] =
        row < slice.count ? to_float(*from.at(slice.row + row, slice.column + i)) : 0.0f;
  });
}

/// Loads dout, and computes deltas[row] = dot(dout, out).
template <int kHead, int kTileRows, typename T>
__device__ void load_dout(const Params<T>& p, const Slice& slice, float* tile, float* deltas) {
  const int warp = int(threadIdx.x) / 32, lane = int(threadIdx.x) % 32;
#pragma unroll 2
  for (int row = warp; row < kTileRows; row += kWarps) {
    float delta = 0;
#pragma unroll
    for (int first = 0; first < kHead; first += 32) {
      const int i = first + lane;
      if (i >= 2 * p.half) continue;
      float value = 0;
      if (row < slice.count) {
        value = to_float(*p.dout.at(slice.row + row, slice.column + i));
        delta = fmaf(value, to_float(*p.out.at(slice.row + row, slice.column + i)), delta);
      }
      tile[row * kStride<kHead> + i] = value;
    }
    for (int offset = 16; offset; offset /= 2) delta += __shfl_xor_sync(~0u, delta, offset);
    if (lane == 0) deltas[row] = delta;
  }
}

template <int kHead, typename T>
__device__ void store_rows(const Params<T>& p, const float* tile, const Slice& slice,
                           const Rows<T>& to) {
  for_each_element<kTile, kHead>(2 * p.half, [&](int row, int i) {
    if (row >= slice.count) return;
    *to.at(slice.row + row, slice.column + i) = from_float<T>(tile[row * kStride<kHead> + i]);
  });
}

/// to = scale x rotate^-1(tile).
template <int kHead, typename T>
__device__ void store_rotated_back(const Params<T>& p, const float* tile, const Slice& slice,
                                   float scale, const Rows<T>& to) {
  for_each_element<kTile, kHead / 2>(p.half, [&](int row, int i) {
    if (row >= slice.count) return;
    const float low = tile[row * kStride<kHead> + i],
                high = tile[row * kStride<kHead> + i + p.half];
    const int64_t angle = int64_t(slice.position + row) * p.half + i;
    const float cos = p.cos[angle], sin = p.sin[angle];
    T* x = to.at(slice.row + row, slice.column + i);
    x[0] = from_float<T>(scale * (low * cos + high * sin));
    x[p.half] = from_float<T>(scale * (high * cos - low * sin));
  });
}

/// Products of rows of two tiles. A thread's: kA neighbours of `a` and kB of `b` that are kLanes
/// apart.
template <int kHead, int kA, int kB>
__device__ void multiply_rows(const float* a, const float* b, float (&products)[kA][kB]) {
  a += thread_row() * kA * kStride<kHead>;
  b += thread_lane() * kStride<kHead>;
#pragma unroll
  for (int i = 0; i < kA; ++i) {
#pragma unroll
    for (int j = 0; j < kB; ++j) products[i][j] = 0;
  }
#pragma unroll 1  // more would spill registers
  for (int d = 0; d < kHead; d += 4) {
    Floats<4> x[kA], y[kB];
#pragma unroll
    for (int i = 0; i < kA; ++i) x[i] = load<4>(a + i * kStride<kHead> + d);
#pragma unroll
    for (int j = 0; j < kB; ++j) y[j] = load<4>(b + j * kLanes * kStride<kHead> + d);
#pragma unroll
    for (int e = 0; e < 4; ++e) {
#pragma unroll
      for (int i = 0; i < kA; ++i) {
#pragma unroll
        for (int j = 0; j < kB; ++j) {
          products[i][j] = fmaf(x[i].at[e], y[j].at[e], products[i][j]);
        }
      }
    }
  }
}

/// Position of a thread's element of multiply_rows in the two tiles.
template <int kA>
__device__ int row_a(int i) {
  return thread_row() * kA + i;
}
__device__ int row_b(int j) {
  return thread_lane() + j * kLanes;
}

/// Writes a thread's elements of multiply_rows to a matrix with rows of kB * kLanes + kPad.
template <int kA, int kB>
__device__ void write_scores(const float (&values)[kA][kB], float* scores) {
#pragma unroll
  for (int i = 0; i < kA; ++i) {
#pragma unroll
    for (int j = 0; j < kB; ++j) {
      scores[row_a<kA>(i) * (kB * kLanes + kPad) + row_b(j)] = values[i][j];
    }
  }
}

/// sums[i] += weight[i] x the thread's columns of `row`.
template <int kHead>
__device__ void add_row(const float (&weight)[kOwned], const float* row,
                        Accumulators<kHead>& sums) {
  constexpr int kVector = Columns<kHead>::kVector;
#pragma unroll
  for (int c = 0; c < Columns<kHead>::kCount; c += kVector) {
    const auto x = load<kVector>(row + Columns<kHead>::at(c));
#pragma unroll
    for (int i = 0; i < kOwned; ++i) {
#pragma unroll
      for (int e = 0; e < kVector; ++e) {
        sums[i][c + e] = fmaf(weight[i], x.at[e], sums[i][c + e]);
      }
    }
  }
}

/// sums += weights [kTile, kCount] x rows of `tile`.
template <int kHead, int kCount>
__device__ void add_products(const float* weights, const float* tile, Accumulators<kHead>& sums) {
  weights += row_a<kOwned>(0) * (kCount + kPad);
#pragma unroll 2
  for (int r = 0; r < kCount; r += 4) {
    Floats<4> w[kOwned];
#pragma unroll
    for (int i = 0; i < kOwned; ++i) w[i] = load<4>(weights + i * (kCount + kPad) + r);
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const float weight[kOwned] = {w[0].at[e], w[1].at[e], w[2].at[e], w[3].at[e]};
      add_row<kHead>(weight, tile + (r + e) * kStride<kHead>, sums);
    }
  }
}

/// sums += transposed weights [kStep, kTile] x rows of `tile`.
template <int kHead>
__device__ void add_transposed_products(const float* weights, const float* tile,
                                        Accumulators<kHead>& sums) {
#pragma unroll 2
  for (int r = 0; r < kStep; ++r) {
    const auto w = load<kOwned>(weights + r * (kTile + kPad) + row_a<kOwned>(0));
    add_row<kHead>(w.at, tile + r * kStride<kHead>, sums);
  }
}

/// tile = factors x sums, for the owned rows.
template <int kHead>
__device__ void write_tile(const Accumulators<kHead>& sums, const float (&factors)[kOwned],
                           float* tile) {
#pragma unroll
  for (int i = 0; i < kOwned; ++i) {
#pragma unroll
    for (int c = 0; c < Columns<kHead>::kCount; ++c) {
      tile[row_a<kOwned>(i) * kStride<kHead> + Columns<kHead>::at(c)] = factors[i] * sums[i][c];
    }
  }
}

/// Maximum or sum over the threads of a row of scores, the same bits in all of them.
__device__ float row_max(float value) {
  for (int offset = kLanes / 2; offset; offset /= 2) {
    value = fmaxf(value, __shfl_xor_sync(~0u, value, offset));
  }
  return value;
}
__device__ float row_sum(float value) {
  for (int offset = kLanes / 2; offset; offset /= 2) {
    value += __shfl_xor_sync(~0u, value, offset);
  }
  return value;
}

/// Shared memory of each kernel, in floats.
template <int kHead>
constexpr int kForwardFloats = 2 * kTile* kStride<kHead> + kTile*(kTile + kPad);
template <int kHead>
constexpr int kQueriesFloats = (2 * kTile + kStep) * kStride<kHead> + kTile*(kStep + kPad) + kTile;
template <int kHead>
constexpr int kKeysFloats = (2 * kTile + kStep) * kStride<kHead> + kStep*(kTile + kPad) + kStep;

/// Dynamic shared memory, zeroed: loads leave the columns beyond head_dim as they are.
__device__ float* cleared_memory(int floats) {
  extern __shared__ float4 attention_memory[];
  auto* const memory = reinterpret_cast<float*>(attention_memory);
  for (int i = int(threadIdx.x); i < floats; i += kThreads) memory[i] = 0;
  __syncthreads();
  return memory;
}

/// Tile of queries or keys, head and sequence of a block. Blocks with an equal tile are next to
/// each other.
struct Work {
  __device__ Work(int sequences, int heads)
      : tile(int(blockIdx.x) / (sequences * heads)),
        sequence(int(blockIdx.x) % (sequences * heads) / heads),
        head(int(blockIdx.x) % heads) {}
  int tile, sequence, head;
};

template <typename T>
__device__ Slice slice_of(const Params<T>& p, int sequence, int head, int first, int rows) {
  return {int64_t(sequence) * p.seq + first, int64_t(head) * 2 * p.half, first,
          min(rows, p.seq - first)};
}

template <typename T>
__device__ float* log_sums_of(const Params<T>& p, int sequence, int head) {
  return p.log_sums + (int64_t(sequence) * p.heads + head) * p.seq;
}

__device__ int tiles_of(int seq) {
  return (seq + kTile - 1) / kTile;
}

template <int kHead, typename T>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm) forward_kernel(Params<T> p) {
  float* const q = cleared_memory(kForwardFloats<kHead>);
  float* const kv = q + kTile * kStride<kHead>;  // keys, then values
  float* const weights = kv + kTile * kStride<kHead>;
  const Work work(p.sequences, p.heads);
  const int tile = tiles_of(p.seq) - 1 - work.tile;  // the longest first
  const int kv_head = work.head / (p.heads / p.kv_heads), first = tile * kTile;
  const Slice queries = slice_of(p, work.sequence, work.head, first, kTile);
  load_rotated<kHead, kTile>(p, p.q, queries, p.scale, q);

  Accumulators<kHead> sums{};
  float largest[kOwned], total[kOwned];
  for (int i = 0; i < kOwned; ++i) largest[i] = -INFINITY, total[i] = 0;
  for (int key = 0; key <= first; key += kTile) {
    const Slice keys = slice_of(p, work.sequence, kv_head, key, kTile);
    __syncthreads();  // the previous values have been read
    load_rotated<kHead, kTile>(p, p.k, keys, 1.0f, kv);
    __syncthreads();
    float scores[kOwned][kTile / kLanes];
    multiply_rows<kHead>(q, kv, scores);
#pragma unroll
    for (int i = 0; i < kOwned; ++i) {
      float top = largest[i], sum = 0;
#pragma unroll
      for (int j = 0; j < kTile / kLanes; ++j) {
        if (key + row_b(j) > first + row_a<kOwned>(i)) scores[i][j] = -INFINITY;
        top = fmaxf(top, scores[i][j]);
      }
      top = row_max(top);  // finite: key 0 is in the first tile, and every query sees it
#pragma unroll
      for (int j = 0; j < kTile / kLanes; ++j) {
        scores[i][j] = expf(scores[i][j] - top);
        sum += scores[i][j];
      }
      const float factor = expf(largest[i] - top);
      total[i] = factor * total[i] + row_sum(sum);
      largest[i] = top;
#pragma unroll
      for (int c = 0; c < Columns<kHead>::kCount; ++c) sums[i][c] *= factor;
    }
    write_scores(scores, weights);
    __syncthreads();  // the keys have been read
    load_rows<kHead, kTile>(p, p.v, keys, kv);
    __syncthreads();
    add_products<kHead, kTile>(weights, kv, sums);
  }

  float* const log_sums = log_sums_of(p, work.sequence, work.head) + first;
  float inverse[kOwned];
#pragma unroll
  for (int i = 0; i < kOwned; ++i) {
    inverse[i] = 1 / total[i];
    if (thread_lane() == 0 && row_a<kOwned>(i) < queries.count) {
      log_sums[row_a<kOwned>(i)] = largest[i] + logf(total[i]);
    }
  }
  write_tile<kHead>(sums, inverse, q);
  __syncthreads();
  store_rows<kHead>(p, q, queries, p.out);
}

/// Softmax of a thread's scores from the log sums, 0 beyond the diagonal and the sequence, and the
/// gradient of the scores from that of the weights.
template <int kA, int kB>
__device__ void softmax_backward(int first_query, int first_key, int seq, const float* log_sums,
                                 const float* deltas, float (&scores)[kA][kB],
                                 float (&gradients)[kA][kB]) {
#pragma unroll
  for (int i = 0; i < kA; ++i) {
    const int query = first_query + row_a<kA>(i);
    const float log_sum = query < seq ? log_sums[query] : 0, delta = deltas[row_a<kA>(i)];
#pragma unroll
    for (int j = 0; j < kB; ++j) {
      const bool seen = first_key + row_b(j) <= query && query < seq;
      scores[i][j] = seen ? expf(scores[i][j] - log_sum) : 0;
      gradients[i][j] = scores[i][j] * (gradients[i][j] - delta);
    }
  }
}

template <int kHead, typename T>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm) backward_queries_kernel(Params<T> p) {
  float* const q = cleared_memory(kQueriesFloats<kHead>);
  float* const dout = q + kTile * kStride<kHead>;
  float* const kv = dout + kTile * kStride<kHead>;  // values, then keys
  float* const dscores = kv + kStep * kStride<kHead>;
  float* const deltas = dscores + kTile * (kStep + kPad);
  const Work work(p.sequences, p.heads);
  const int tile = tiles_of(p.seq) - 1 - work.tile;  // the longest first
  const int kv_head = work.head / (p.heads / p.kv_heads), first = tile * kTile;
  const Slice queries = slice_of(p, work.sequence, work.head, first, kTile);
  load_rotated<kHead, kTile>(p, p.q, queries, p.scale, q);
  load_dout<kHead, kTile>(p, queries, dout, deltas);

  Accumulators<kHead> sums{};
  for (int key = 0; key < first + queries.count; key += kStep) {
    const Slice keys = slice_of(p, work.sequence, kv_head, key, kStep);
    __syncthreads();  // the previous keys have been read
    load_rows<kHead, kStep>(p, p.v, keys, kv);
    __syncthreads();
    float scores[kOwned][kStep / kLanes], gradients[kOwned][kStep / kLanes];
    multiply_rows<kHead>(dout, kv, gradients);
    __syncthreads();  // the values have been read
    load_rotated<kHead, kStep>(p, p.k, keys, 1.0f, kv);
    __syncthreads();
    multiply_rows<kHead>(q, kv, scores);
    softmax_backward(first, key, p.seq, log_sums_of(p, work.sequence, work.head), deltas, scores,
                     gradients);
    write_scores(gradients, dscores);
    __syncthreads();
    add_products<kHead, kStep>(dscores, kv, sums);
  }
  write_tile<kHead>(sums, {1, 1, 1, 1}, q);
  __syncthreads();
  store_rotated_back<kHead>(p, q, queries, p.scale, p.dq);
}

template <int kHead, typename T>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm) backward_keys_kernel(Params<T> p) {
  float* const k = cleared_memory(kKeysFloats<kHead>);
  float* const v = k + kTile * kStride<kHead>;
  float* const rows = v + kTile * kStride<kHead>;        // queries, dout, queries again
  float* const weights = rows + kStep * kStride<kHead>;  // then gradients of the scores
  float* const deltas = weights + kStep * (kTile + kPad);
  const Work work(p.sequences, p.kv_heads);
  const int first = work.tile * kTile, group = p.heads / p.kv_heads;
  const Slice keys = slice_of(p, work.sequence, work.head, first, kTile);
  load_rotated<kHead, kTile>(p, p.k, keys, 1.0f, k);
  load_rows<kHead, kTile>(p, p.v, keys, v);

  Accumulators<kHead> dk{}, dv{};
  for (int head = work.head * group; head < (work.head + 1) * group; ++head) {
    for (int query = first; query < p.seq; query += kStep) {
      const Slice queries = slice_of(p, work.sequence, head, query, kStep);
      __syncthreads();  // the previous queries have been read
      load_rotated<kHead, kStep>(p, p.q, queries, p.scale, rows);
      __syncthreads();
      float scores[kStep / kLanes][kTile / kLanes], gradients[kStep / kLanes][kTile / kLanes];
      multiply_rows<kHead>(rows, k, scores);
      __syncthreads();  // the queries have been read
      load_dout<kHead, kStep>(p, queries, rows, deltas);
      __syncthreads();
      multiply_rows<kHead>(rows, v, gradients);
      softmax_backward(query, first, p.seq, log_sums_of(p, work.sequence, head), deltas, scores,
                       gradients);
      write_scores(scores, weights);
      __syncthreads();
      add_transposed_products<kHead>(weights, rows, dv);
      __syncthreads();  // the weights and dout have been read
      write_scores(gradients, weights);
      load_rotated<kHead, kStep>(p, p.q, queries, p.scale, rows);
      __syncthreads();
      add_transposed_products<kHead>(weights, rows, dk);
    }
  }
  write_tile<kHead>(dk, {1, 1, 1, 1}, k);
  write_tile<kHead>(dv, {1, 1, 1, 1}, v);
  __syncthreads();
  store_rotated_back<kHead>(p, k, keys, 1.0f, p.dk);
  store_rows<kHead>(p, v, keys, p.dv);
}

/// One block per tile of kTile positions, for each of `heads` heads of each sequence.
template <typename T>
void launch(void (*kernel)(Params<T>), const Params<T>& params, int heads, int floats,
            const char* name, cudaStream_t stream) {
  const int bytes = floats * int(sizeof(float));
  // Every time: the attribute is of the kernel on the current device.
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes), name);
  const int64_t tiles = (params.seq + kTile - 1) / kTile;
  kernel<<<unsigned(tiles * params.sequences * heads), kThreads, size_t(bytes), stream>>>(params);
  check_launch(name);
}

/// Calls body(std::integral_constant<int, kHead>) with the smallest compiled head size.
template <typename Body>
void with_head(int64_t head_dim, const Body& body) {
  if (head_dim <= 32) return body(std::integral_constant<int, 32>{});
  if (head_dim <= 64) return body(std::integral_constant<int, 64>{});
  body(std::integral_constant<int, kMaxHead>{});
}

/// Calls body(T{}).
template <typename Body>
void with_type(DType dtype, const char* name, const Body& body) {
  if (dtype == DType::f32) return body(float{});
  if (dtype == DType::bf16) return body(__nv_bfloat16{});
  throw InvalidArgument(std::string(name) + ": dtype " + std::string(name_of(dtype)) +
                        ": expected f32 or bf16");
}

template <typename T>
Rows<T> rows_of(const Tensor& tensor) {
  return {tensor.as<T>(), tensor.stride(0)};
}

template <typename T>
Params<T> make_params(const AttentionShape& shape, const RopeTable& rope, const Tensor& q,
                      const Tensor& k, const Tensor& v, const Tensor& out, const Tensor& log_sums) {
  Params<T> p{};
  p.sequences = int(shape.batch), p.seq = int(shape.seq), p.heads = int(shape.heads);
  p.kv_heads = int(shape.kv_heads), p.half = int(shape.head_dim / 2);
  p.scale = float(1 / std::sqrt(double(shape.head_dim)));
  p.cos = rope.cos(0), p.sin = rope.sin(0);
  p.q = rows_of<const T>(q), p.k = rows_of<const T>(k), p.v = rows_of<const T>(v);
  p.out = rows_of<T>(out), p.log_sums = log_sums.as<float>();
  return p;
}

bool empty(const AttentionShape& shape) {
  return shape.batch * shape.seq * shape.heads == 0;
}

}  // namespace

void check_attention(const AttentionShape& shape) {
  const std::string name = "attention: head_dim " + std::to_string(shape.head_dim);
  if (shape.head_dim < 2 || shape.head_dim > kMaxHead || shape.head_dim % 2 != 0) {
    throw Unsupported(name + ": GPUs support even sizes from 2 to " + std::to_string(kMaxHead));
  }
  int device = 0, available = 0;
  check(cudaGetDevice(&device), "attention");
  check(cudaDeviceGetAttribute(&available, cudaDevAttrMaxSharedMemoryPerBlockOptin, device),
        "attention");
  with_head(shape.head_dim, [&](auto head) {
    constexpr int kHead = decltype(head)::value;
    constexpr int kBytes =
        int(sizeof(float)) *
        std::max({kForwardFloats<kHead>, kQueriesFloats<kHead>, kKeysFloats<kHead>});
    static_assert(kBytes <= 99 * 1024, "shared memory of a block on sm_86");
    if (kBytes <= available) return;
    throw Unsupported(name + ": needs " + std::to_string(kBytes) +
                      " bytes of shared memory per block, this GPU has " +
                      std::to_string(available));
  });
}

void attention_forward(CUstream_st* stream, const AttentionShape& shape, const RopeTable& rope,
                       const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out,
                       const Tensor& log_sums) {
  if (empty(shape)) return;
  with_type(q.dtype(), "attention", [&]<typename T>(T) {
    with_head(shape.head_dim, [&](auto head) {
      constexpr int kHead = decltype(head)::value;
      const auto params = make_params<T>(shape, rope, q, k, v, out, log_sums);
      launch(forward_kernel<kHead, T>, params, params.heads, kForwardFloats<kHead>, "attention",
             stream);
    });
  });
}

void attention_backward(CUstream_st* stream, const AttentionShape& shape, const RopeTable& rope,
                        const AttentionGradients& tensors) {
  if (empty(shape)) return;
  constexpr const char* kName = "attention_backward";
  with_type(tensors.q.dtype(), kName, [&]<typename T>(T) {
    with_head(shape.head_dim, [&](auto head) {
      constexpr int kHead = decltype(head)::value;
      const AttentionGradients& t = tensors;
      auto params = make_params<T>(shape, rope, t.q, t.k, t.v, t.out, t.log_sums);
      params.dout = rows_of<const T>(t.dout);
      params.dq = rows_of<T>(t.dq), params.dk = rows_of<T>(t.dk), params.dv = rows_of<T>(t.dv);
      launch(backward_queries_kernel<kHead, T>, params, params.heads, kQueriesFloats<kHead>, kName,
             stream);
      launch(backward_keys_kernel<kHead, T>, params, params.kv_heads, kKeysFloats<kHead>, kName,
             stream);
    });
  });
}

}  // namespace tandem::gpu
