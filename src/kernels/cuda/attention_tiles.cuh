// Tiles of attention in shared memory, and a thread's products of them: 256 threads as 16 x 16.
// Tiles are f32, rotated while being loaded, and 0 beyond the real head size and sequence.
#pragma once

#include <cstdint>

#include "core/cuda/element.cuh"

namespace tandem::gpu::attention {

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr int kLanes = 16;  // threads next to each other in a row of scores: 16 x 16 threads
constexpr int kTile = 64;   // rows that a block owns; also keys of a step of the forward pass
constexpr int kStep = 32;   // rows of the other side of a step of the backward pass
constexpr int kOwned = 4;   // owned rows of a thread
constexpr int kPad = 4;     // floats after a row: 16-byte accesses to 8 rows use all banks

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
  // Kernels with a mask:
  int window;                      // keys that a query reads, its own included; 0: all
  const int32_t* document_starts;  // [sequences, seq], positions, or nullptr
};

template <int kCount>
struct alignas(kCount * sizeof(float)) Floats {
  float at[kCount];
};
template <int kCount>
__device__ Floats<kCount> load(const float* from) {
  return *reinterpret_cast<const Floats<kCount>*>(from);
}

__device__ inline int thread_row() {
  return int(threadIdx.x) / kLanes;
}
__device__ inline int thread_lane() {
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

/// Position in its document of a row of the slice.
template <typename T>
__device__ int64_t position_of(const Params<T>& p, const Slice& slice, int row) {
  const int position = slice.position + row;
  return p.document_starts ? position - p.document_starts[slice.row + row] : position;
}

/// tile = scale x rotate(from), 0 for rows beyond the slice.
template <int kHead, int kTileRows, typename T>
__device__ void load_rotated(const Params<T>& p, const Rows<const T>& from, const Slice& slice,
                             float scale, float* tile) {
  for_each_element<kTileRows, kHead / 2>(p.half, [&](int row, int i) {
    float low = 0, high = 0, cos = 0, sin = 0;
    if (row < slice.count) {
      const T* x = from.at(slice.row + row, slice.column + i);
      const int64_t angle = position_of(p, slice, row) * p.half + i;
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
    const int64_t angle = position_of(p, slice, row) * p.half + i;
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
__device__ inline int row_a(int i) {
  return thread_row() * kA + i;
}
__device__ inline int row_b(int j) {
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
__device__ inline float row_max(float value) {
  for (int offset = kLanes / 2; offset; offset /= 2) {
    value = fmaxf(value, __shfl_xor_sync(~0u, value, offset));
  }
  return value;
}
__device__ inline float row_sum(float value) {
  for (int offset = kLanes / 2; offset; offset /= 2) {
    value += __shfl_xor_sync(~0u, value, offset);
  }
  return value;
}

}  // namespace tandem::gpu::attention
