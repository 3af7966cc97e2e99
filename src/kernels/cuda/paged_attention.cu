// Attention over paged keys and values. A block reads kSplit tokens of a sequence once, for all
// query heads that share a key head; the sums of a row's splits are added in order. Which tokens
// make a split, and the order within it, are fixed, so a row's bits do not depend on the batch.
// Chunks of a prompt have kernels whose blocks share keys among tokens too (paged_chunks.cuh, and
// hopper_chunks.h); many other rows may have hopper_singles.h, and few hopper_few.h.
#include <algorithm>
#include <cmath>
#include <string>

#include "core/cuda/check.h"
#include "core/cuda/early_start.cuh"
#include "core/cuda/load_module.cuh"
#include "kernels/cuda/hopper_chunks.h"
#include "kernels/cuda/hopper_few.h"
#include "kernels/cuda/hopper_singles.h"
#include "kernels/cuda/kernels.h"
#include "kernels/cuda/paged.cuh"
#include "kernels/cuda/paged_chunks.cuh"
#include "kernels/cuda/paged_floats.cuh"
#include "kernels/cuda/paged_tiles.cuh"

namespace tandem::gpu {
namespace {

constexpr int kMaxPagedHead = 256;
constexpr float kLog2E = 1.44269504f;

// Rotation of q and k, and the pages' new rows.

template <typename T, int kWidth>
struct AppendParams {
  PagedLines lines;
  Rows<T, kWidth> q, k, v;
  T *keys, *values;
  const float *cos, *sin;
  int64_t first_row;
  int heads, kv_heads, half;
};

/// One block per row.
template <typename T, int kWidth>
__global__ void __launch_bounds__(kMapThreads) append_kernel(const AppendParams<T, kWidth> p) {
  let_next_start();
  wait_for_previous();
  const int64_t row = p.first_row + blockIdx.x;
  const int sequence = p.lines.sequences[row];
  if (sequence < 0) return;
  const int position = p.lines.positions[row];
  const int64_t slot = p.lines.slot(sequence, position);
  const int vectors = p.half / kWidth, rotated = (p.heads + p.kv_heads) * vectors;
  const float* const cos = p.cos + int64_t(position) * p.half;
  const float* const sin = p.sin + int64_t(position) * p.half;
  for (int i = int(threadIdx.x); i < rotated; i += kMapThreads) {
    const int head = i / vectors, first = i % vectors * kWidth;
    const bool of_q = head < p.heads;
    const int offset = (of_q ? head : head - p.heads) * 2 * p.half + first;
    T* const from = (of_q ? p.q.data + row * p.q.stride : p.k.data + row * p.k.stride) + offset;
    T* const to = of_q ? from : p.keys + slot * p.kv_heads * 2 * p.half + offset;
    auto low = load_vector<T, kWidth>(from), high = load_vector<T, kWidth>(from + p.half);
    rotate(low, high, cos + first, sin + first);
    store_vector(to, low);
    store_vector(to + p.half, high);
  }
  const T* const value = p.v.data + row * p.v.stride;
  T* const to = p.values + slot * p.kv_heads * 2 * p.half;
  for (int i = int(threadIdx.x); i < 2 * p.kv_heads * vectors; i += kMapThreads) {
    store_vector(to + i * kWidth, load_vector<T, kWidth>(value + i * kWidth));
  }
}

constexpr int kAddThreads = 256;
constexpr int kMaxSplits = 2048;

/// Adds the sums of a row's splits: a block per head and row. Threads that have the same elements
/// take every so-manieth split, and their sums are added in order.
template <typename T>
__global__ void __launch_bounds__(kAddThreads) add_splits_kernel(const AttendParams<T> p) {
  let_next_start();
  wait_for_previous();
  const int head = int(blockIdx.x);
  const int64_t row = blockIdx.y;
  T* const out = p.out + row * p.out_stride + int64_t(head) * p.head_dim;
  if (p.lines.sequences[row] < 0) {
    for (int e = int(threadIdx.x); e < p.head_dim; e += kAddThreads) out[e] = from_float<T>(0);
    return;
  }
  const int position = p.lines.positions[row];
  const int first = p.first_key(position) / kSplit, splits = position / kSplit + 1 - first;
  const float* const scales = p.scales + (p.partial(row, head, 0) + first) * 2;
  const float* const sums = p.sums + (p.partial(row, head, 0) + first) * p.head_dim;

  __shared__ float weights[kMaxSplits];
  __shared__ WarpValues tops, totals;
  __shared__ Vector<float, 4> group_sums[kAddThreads];
  float top = -INFINITY;
  for (int s = int(threadIdx.x); s < splits; s += kAddThreads) top = fmaxf(top, scales[2 * s]);
  top = combine_block(top, Larger{}, tops);
  float total = 0;
  for (int s = int(threadIdx.x); s < splits; s += kAddThreads) {
    weights[s] = exp2f(scales[2 * s] - top);
    total += weights[s] * scales[2 * s + 1];
  }
  total = combine_block(total, Plus{}, totals);

  const int vectors = p.head_dim / 4, groups = kAddThreads / vectors;
  const int group = int(threadIdx.x) / vectors, vector = int(threadIdx.x) % vectors;
  Vector<float, 4> sum = {};
  if (group < groups) {
#pragma unroll 4
    for (int s = group; s < splits; s += groups) {
      const auto value = load_vector<float, 4>(sums + int64_t(s) * p.head_dim + vector * 4);
#pragma unroll
      for (int e = 0; e < 4; ++e) sum.at[e] = fmaf(weights[s], value.at[e], sum.at[e]);
    }
  }
  group_sums[threadIdx.x] = sum;
  __syncthreads();
  if (group != 0) return;
  for (int g = 1; g < groups; ++g) {
    const Vector<float, 4> other = group_sums[g * vectors + vector];
#pragma unroll
    for (int e = 0; e < 4; ++e) sum.at[e] += other.at[e];
  }
#pragma unroll
  for (int e = 0; e < 4; ++e) out[vector * 4 + e] = from_float<T>(sum.at[e] / total);
}

/// Lets a kernel have so much dynamic shared memory.
template <typename Kernel>
void allow_memory(Kernel* kernel, int bytes) {
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes),
        "paged_attention");
}

template <typename T>
dim3 attend_grid(const AttendParams<T>& p, int64_t rows, int heads_of_block) {
  const int blocks_of_group = (p.group + heads_of_block - 1) / heads_of_block;
  return dim3(unsigned(p.splits), unsigned(p.kv_heads * blocks_of_group), unsigned(rows));
}

template <int kDim, int kGroup>
void launch_attend(const AttendParams<float>& p, int64_t rows, cudaStream_t stream) {
  using Tile = PagedTile<kDim, kGroup>;
  constexpr int kCopies = Tile::kSteps * 2 * Tile::kThreads * 16;
  constexpr int kSums = Tile::kSets * kGroup * kDim * int(sizeof(float));
  constexpr int kBytes = std::max(kCopies, kSums);
  const auto kernel = attend_kernel<kDim, kGroup>;
  allow_memory(kernel, kBytes);
  launch_early("paged_attention", kernel, attend_grid(p, rows, kGroup), Tile::kThreads, kBytes,
               stream, true, p);
}

template <int kDim>
void launch_group(const AttendParams<float>& p, int64_t rows, cudaStream_t stream) {
  p.group == 1 ? launch_attend<kDim, 1>(p, rows, stream) : launch_attend<kDim, 4>(p, rows, stream);
}
void launch_head(const AttendParams<float>& p, int64_t rows, cudaStream_t stream) {
  if (p.head_dim <= 32) return launch_group<32>(p, rows, stream);
  if (p.head_dim <= 64) return launch_group<64>(p, rows, stream);
  launch_group<128>(p, rows, stream);
}

template <int kDim>
void launch_tiles(const AttendParams<__nv_bfloat16>& p, int64_t rows, cudaStream_t stream) {
  constexpr int kBytes = 2 * kSplit * kDim * 2;
  static_assert(kBytes >= kWarps * kColumns * kDim * int(sizeof(float)));
  const auto kernel = attend_tiles_kernel<kDim>;
  allow_memory(kernel, kBytes);
  launch_early("paged_attention", kernel, attend_grid(p, rows, kColumns), kPagedThreads, kBytes,
               stream, true, p);
}
void launch_head(const AttendParams<__nv_bfloat16>& p, int64_t rows, cudaStream_t stream) {
  if (p.head_dim <= 64) return launch_tiles<64>(p, rows, stream);
  if (p.head_dim <= 128) return launch_tiles<128>(p, rows, stream);
  launch_tiles<kMaxPagedHead>(p, rows, stream);
}

template <int kDim>
void launch_chunk(const AttendParams<__nv_bfloat16>& p, const PagedChunk& chunk,
                  cudaStream_t stream) {
  constexpr int kBytes = 4 * kPage * kDim * 2;
  const auto kernel = attend_chunk_kernel<kDim>;
  allow_memory(kernel, kBytes);
  const dim3 grid(unsigned((chunk.rows * p.group - 1) / kChunkRows + 1), unsigned(p.kv_heads));
  kernel<<<grid, kChunkThreads, kBytes, stream>>>(p, {chunk.first, int(chunk.rows)});
  check_launch("paged_attention");
}
void launch_chunk(const AttendParams<__nv_bfloat16>& p, const PagedChunk& chunk,
                  cudaStream_t stream, int64_t head_dim) {
  head_dim <= 64 ? launch_chunk<64>(p, chunk, stream) : launch_chunk<128>(p, chunk, stream);
}

/// Rows of a run that have blocks of their own; the others are in chunks.
int64_t single_rows(const PagedShape& shape, const PagedRows& rows, DType dtype) {
  const bool has_chunks =
      dtype == DType::bf16 && shape.head_dim <= kMaxChunkHead && !rows.chunks.empty();
  return has_chunks ? rows.chunks.front().first : rows.positions.dim(0);
}

struct RowRange {
  int64_t first, count;
};

template <typename T, int kWidth>
void launch_append(const PagedShape& shape, const RopeTable& rope, const PagedLines& lines,
                   const PagedTensors& t, const RowRange& rows, cudaStream_t stream) {
  const AppendParams<T, kWidth> params{
      lines,          Rows<T, kWidth>(t.q), Rows<T, kWidth>(t.k), Rows<T, kWidth>(t.v),
      t.keys.as<T>(), t.values.as<T>(),     rope.cos(0),          rope.sin(0),
      rows.first,     int(shape.heads),     int(shape.kv_heads),  int(rope.half())};
  launch_early("paged_attention", append_kernel<T, kWidth>, unsigned(rows.count), kMapThreads, 0,
               stream, true, params);
}
template <typename T>
void append(const PagedShape& shape, const RopeTable& rope, const PagedLines& lines,
            const PagedTensors& t, const RowRange& rows, cudaStream_t stream) {
  constexpr int kWidth = 16 / int(sizeof(T));
  rope.half() % kWidth == 0 ? launch_append<T, kWidth>(shape, rope, lines, t, rows, stream)
                            : launch_append<T, 1>(shape, rope, lines, t, rows, stream);
}

int64_t num_splits(int64_t tokens) {
  return (tokens - 1) / kSplit + 1;
}

/// Elements of the sums and scales of all splits. Those of attend_hopper_singles are longer.
int64_t num_partials(const PagedShape& shape) {
  return shape.max_singles() * shape.heads * num_splits(shape.max_tokens) * (shape.head_dim + 2);
}

void check_tensors(const PagedShape& shape, const PagedRows& rows, const PagedTensors& t) {
  const int64_t n = rows.positions.dim(0), pages = t.keys.dim(0);
  if (n > shape.rows) {
    throw InvalidArgument("paged_attention: " + std::to_string(n) + " rows: expected at most " +
                          std::to_string(shape.rows));
  }
  constexpr int64_t kMaxRows = 65535;  // of a grid
  const int64_t singles = single_rows(shape, rows, t.q.dtype());
  if (singles > std::min(kMaxRows, shape.max_singles())) {
    throw InvalidArgument("paged_attention: " + std::to_string(singles) +
                          " rows outside chunks: expected at most " +
                          std::to_string(std::min(kMaxRows, shape.max_singles())));
  }
  require_dtype("paged_attention: sequences", rows.sequences, DType::i32);
  require_dtype("paged_attention: positions", rows.positions, DType::i32);
  require_dtype("paged_attention: pages", rows.pages, DType::i32);
  require_shape("paged_attention: sequences", rows.sequences, {n});
  require_shape("paged_attention: q", t.q, {n, shape.heads * shape.head_dim});
  require_shape("paged_attention: k", t.k, {n, shape.kv_heads * shape.head_dim});
  require_shape("paged_attention: v", t.v, {n, shape.kv_heads * shape.head_dim});
  require_shape("paged_attention: out", t.out, {n, shape.heads * shape.head_dim});
  for (const Tensor* cache : {&t.keys, &t.values}) {
    require_shape("paged_attention: keys or values", *cache,
                  {pages, kPageTokens, shape.kv_heads, shape.head_dim});
    require_dtype("paged_attention: keys or values", *cache, t.q.dtype());
  }
  if (!have_vectors(16 / int(size_of(t.q.dtype())), {&t.q, &t.k, &t.v, &t.out})) {
    throw InvalidArgument("paged_attention: q " + t.q.describe() + ": expected rows of 16 bytes");
  }
}

}  // namespace

int64_t paged_attention_partials(const PagedShape& shape) {
  if (shape.head_dim < 16 || shape.head_dim > kMaxPagedHead || shape.head_dim % 16 != 0) {
    throw Unsupported("paged_attention: head_dim " + std::to_string(shape.head_dim) +
                      ": expected a multiple of 16 up to " + std::to_string(kMaxPagedHead));
  }
  if (num_splits(shape.max_tokens) > kMaxSplits) {
    throw Unsupported("paged_attention: sequences of " + std::to_string(shape.max_tokens) +
                      " tokens: expected at most " + std::to_string(kMaxSplits * kSplit));
  }
  return num_partials(shape) + single_counters(shape) + 1;  // the ticket of attend_hopper_chunks
}

void paged_attention(cudaStream_t stream, const PagedShape& shape, const RopeTable& rope,
                     int64_t window, const PagedRows& rows, const PagedTensors& t) {
  check_tensors(shape, rows, t);
  const int64_t n = rows.positions.dim(0);
  if (n == 0) return;
  const PagedLines lines(rows);
  with_element("paged_attention: q", t.q, [&]<typename T>(T) {
    if (sizeof(T) == 4 && shape.head_dim > 128) {
      throw Unsupported("paged_attention: head_dim " + std::to_string(shape.head_dim) +
                        " in f32: expected at most 128, or bf16");
    }
    const int64_t singles = single_rows(shape, rows, t.q.dtype());
    const bool is_few = sizeof(T) == 2 && takes_hopper_few(shape, window, rows, singles);
    const int64_t appended = is_few && rows.distinct_sequences ? singles : 0;
    if (appended < n) append<T>(shape, rope, lines, t, {appended, n - appended}, stream);
    const int splits = int(num_splits(rows.longest > 0 ? rows.longest : shape.max_tokens));
    auto* const sums = t.scratch.as<float>();
    const AttendParams<T> params{lines,
                                 t.q.as<T>(),
                                 t.q.stride(0),
                                 t.keys.as<T>(),
                                 t.values.as<T>(),
                                 sums,
                                 sums + singles * shape.heads * splits * shape.head_dim,
                                 t.out.as<T>(),
                                 t.out.stride(0),
                                 int(shape.heads),
                                 int(shape.kv_heads),
                                 int(shape.head_dim),
                                 int(shape.heads / shape.kv_heads),
                                 splits,
                                 int(window),
                                 float(kLog2E / std::sqrt(double(shape.head_dim)))};
    if (is_few) {
      attend_hopper_few(stream, shape, rope, window, rows, singles, t);
    } else if (sizeof(T) == 2 && takes_hopper_singles(shape, singles)) {
      auto* const counters = static_cast<int*>(t.scratch.data()) + num_partials(shape);
      attend_hopper_singles(stream, shape, window, rows, singles, t, sums, counters);
    } else if (singles > 0) {
      launch_head(params, singles, stream);
      launch_early("paged_attention", add_splits_kernel<T>,
                   dim3(unsigned(shape.heads), unsigned(singles)), kAddThreads, 0, stream, true,
                   params);
    }
    if constexpr (sizeof(T) == 2) {
      if (singles == n) return;
      if (has_hopper_pages(shape.head_dim)) {
        auto* const ticket = static_cast<int*>(t.scratch.data()) + t.scratch.elements() - 1;
        return attend_hopper_chunks(stream, shape, window, rows, t, ticket);
      }
      for (const PagedChunk& chunk : rows.chunks) {
        launch_chunk(params, chunk, stream, shape.head_dim);
      }
    }
  });
}

}  // namespace tandem::gpu
