// Code shared by the kernels of attention over pages: rows, parameters, copies to shared memory,
// and products of tiles on tensor cores.
#pragma once

#include <cmath>

#include "core/cuda/early_start.cuh"
#include "core/cuda/multiply_tile.cuh"
#include "kernels/cuda/kernels.h"
#include "kernels/cuda/rows.cuh"

namespace tandem::gpu {
namespace {

constexpr int kSplit = 2 * int(kPageTokens);
constexpr int kPagedThreads = 128;

/// Lines and positions of the rows of a run.
struct PagedLines {
  const int32_t *sequences, *positions, *pages;
  int64_t pages_of_line;

  explicit PagedLines(const PagedRows& rows)
      : sequences(rows.sequences.as<int32_t>()),
        positions(rows.positions.as<int32_t>()),
        pages(rows.pages.as<int32_t>()),
        pages_of_line(rows.pages.stride(0)) {}
  /// Index of a token among those of all pages.
  __device__ int64_t slot(int sequence, int position) const {
    const int32_t page = pages[sequence * pages_of_line + position / int(kPageTokens)];
    return int64_t(page) * kPageTokens + position % int(kPageTokens);
  }
};

template <typename T>
struct AttendParams {
  PagedLines lines;
  const T* q;
  int64_t q_stride;
  const T *keys, *values;
  float *sums, *scales;  // [rows, heads, splits, head_dim] and [rows, heads, splits, 2]
  T* out;
  int64_t out_stride;
  int heads, kv_heads, head_dim, group, splits, window;
  float scale;

  /// First key that the query at a position reads.
  __device__ int first_key(int position) const {
    return window > 0 ? max(0, position + 1 - window) : 0;
  }
  __device__ int64_t partial(int64_t row, int head, int split) const {
    return (row * heads + head) * splits + split;
  }
};

/// Keys and query heads of a block: those of one split, and up to kHeads of one key head.
struct SplitOfBlock {
  int64_t row;
  int sequence, position, split, begin, first, end, kv_head, first_head, heads;

  /// False if the block has no key: its row's are in other splits, or the row is none.
  template <int kHeads, typename T>
  __device__ bool find(const AttendParams<T>& p) {
    row = blockIdx.z;
    sequence = p.lines.sequences[row];
    if (sequence < 0) return false;
    position = p.lines.positions[row];
    split = int(blockIdx.x), begin = split * kSplit;
    first = max(begin, p.first_key(position)), end = min(begin + kSplit, position + 1);
    if (first >= end) return false;
    const int blocks_of_group = (p.group + kHeads - 1) / kHeads;
    kv_head = int(blockIdx.y) / blocks_of_group;
    first_head = kv_head * p.group + int(blockIdx.y) % blocks_of_group * kHeads;
    heads = min(kHeads, (kv_head + 1) * p.group - first_head);
    return true;
  }
};

/// Copies a vector of a key or value.
template <typename T, int kWidth>
__device__ void store_vector(T* to, const Vector<T, kWidth>& value) {
  *reinterpret_cast<Vector<T, kWidth>*>(to) = value;
}
template <typename T, int kWidth>
__device__ Vector<T, kWidth> load_vector(const T* from) {
  return *reinterpret_cast<const Vector<T, kWidth>*>(from);
}
/// Rotates elements of a head and those half a head later, with the same bits in every kernel.
template <typename T, int kWidth>
__device__ void rotate(Vector<T, kWidth>& low, Vector<T, kWidth>& high, const float* cos,
                       const float* sin) {
#pragma unroll
  for (int e = 0; e < kWidth; ++e) {
    const float l = to_float(low.at[e]), h = to_float(high.at[e]);
    const float c = cos[e], s = sin[e];
    low.at[e] = from_float<T>(__fmaf_rn(l, c, -__fmul_rn(h, s)));
    high.at[e] = from_float<T>(__fmaf_rn(h, c, __fmul_rn(l, s)));
  }
}

/// 16 bytes of global memory to shared memory, or zeros.
__device__ void copy_async(void* to, const void* from, bool valid) {
  const auto shared = unsigned(__cvta_generic_to_shared(to));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(from),
               "r"(valid ? 16 : 0));
}
__device__ void commit_copies() {
  asm volatile("cp.async.commit_group;");
}
template <int kPending>
__device__ void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending));
}

__device__ void load_tile(uint32_t (&a)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3])
               : "r"(unsigned(__cvta_generic_to_shared(row))));
}
__device__ void load_transposed_tile(uint32_t (&a)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3])
               : "r"(unsigned(__cvta_generic_to_shared(row))));
}
/// Transposes an 8 x 8 matrix of 16-bit elements, two of a row in each lane.
__device__ uint32_t transposed(uint32_t pair) {
  uint32_t result;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(pair));
  return result;
}
__device__ uint32_t packed(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}
/// Over the rows of a tile's columns: lanes with equal lane % 4.
template <typename Combine>
__device__ float combine_rows(float value, const Combine& combine) {
#pragma unroll
  for (int offset = 4; offset < 32; offset *= 2) {
    value = combine(value, __shfl_xor_sync(~0u, value, offset));
  }
  return value;
}

/// Chunk of 16 bytes of a token's key or value, in shared memory with kChunks of them per token:
/// eight tokens' chunks of one number are in all banks.
template <int kChunks>
__device__ uint4* chunk_of(uint4* rows, int token, int chunk) {
  return rows + token * kChunks + (chunk ^ (token & 7));
}

}  // namespace
}  // namespace tandem::gpu
