// Sums of the columns of a matrix, in a fixed order: gradients of biases and of norms' weights.
#pragma once

#include "kernels/cuda/rows.cuh"

namespace tandem::gpu {

constexpr int kColumnThreads = 512;

/// Each block adds a column range, blockDim.x vectors wide, of all rows: each thread every
/// blockDim.y-th row, then the threads of a column as a tree. blockDim.y is a power of two.
template <typename T, int kWidth>
__global__ void __launch_bounds__(kColumnThreads)
    column_sums_kernel(Rows<T, kWidth> rows, int64_t num_rows, Rows<float, kWidth> result,
                       int64_t vectors, bool accumulate) {
  __shared__ Vector<float, kWidth> sums[kColumnThreads];
  const int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  Vector<float, kWidth> sum{};
  if (i < vectors) {
#pragma unroll 4
    for (int64_t row = threadIdx.y; row < num_rows; row += blockDim.y) {
      const Vector<T, kWidth> values = rows.load(row, i);
#pragma unroll
      for (int e = 0; e < kWidth; ++e) sum.at[e] += to_float(values.at[e]);
    }
  }
  const unsigned slot = threadIdx.y * blockDim.x + threadIdx.x;
  sums[slot] = sum;
  for (unsigned half = blockDim.y / 2; half; half /= 2) {
    __syncthreads();
    if (threadIdx.y >= half) continue;
#pragma unroll
    for (int e = 0; e < kWidth; ++e) sums[slot].at[e] += sums[slot + half * blockDim.x].at[e];
  }
  if (threadIdx.y != 0 || i >= vectors) return;
  Vector<float, kWidth> total{};
  if (accumulate) total = result.load(0, i);
#pragma unroll
  for (int e = 0; e < kWidth; ++e) total.at[e] += sums[slot].at[e];
  result.store(0, i, total);
}

/// Vectors across a block: 128 bytes of a row, less if that gives too few blocks.
inline unsigned column_lanes(int64_t vectors, unsigned vector_bytes) {
  constexpr int64_t kMinBlocks = 128;
  unsigned lanes = 128u / vector_bytes;
  while (lanes * vector_bytes > 32 && (vectors - 1) / lanes + 1 < kMinBlocks) lanes /= 2;
  return lanes;
}

/// result = sums of the columns of the first `num_rows` rows, or added to them.
template <typename T, int kWidth>
void launch_column_sums(Rows<T, kWidth> rows, int64_t num_rows, Rows<float, kWidth> result,
                        int64_t vectors, bool accumulate, cudaStream_t stream) {
  if (vectors == 0) return;
  const unsigned lanes = column_lanes(vectors, kWidth * unsigned(sizeof(T)));
  column_sums_kernel<<<unsigned((vectors - 1) / lanes + 1), dim3(lanes, kColumnThreads / lanes), 0,
                       stream>>>(rows, num_rows, result, vectors, accumulate);
  check_launch("column_sums_kernel");
}

}  // namespace tandem::gpu
