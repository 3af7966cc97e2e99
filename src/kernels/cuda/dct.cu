// Cosine transforms by tiles: a thread block a tile, two products from shared memory, 4 x 4 results
// a thread.
#include "core/cuda/check.h"
#include "core/cuda/load_module.cuh"
#include "kernels/cuda/kernels.h"
#include "kernels/dct.h"

namespace tandem::gpu {
namespace {

constexpr int kSide = kMaxDctTile;
constexpr int kThreads = 256;
constexpr int kPitch = kSide + 1;  // rows begin in different banks
constexpr int kBlock = 4;          // results of a thread in each dimension
constexpr int kAcross = kSide / kBlock;

// Cosine of coefficient k and value n of a transform of `size`. The angle is reduced exactly.
__device__ float cosine(int k, int n, int size) {
  const float norm = sqrtf((k > 0 ? 2.0f : 1.0f) / float(size));
  return norm * cospif(float(k * (2 * n + 1) % (4 * size)) / float(2 * size));
}

// The cosines, whose rows are coefficients or, transposed, values; zeros past them.
__device__ void make_basis(float (*basis)[kPitch], int size, bool transposed) {
  for (int i = int(threadIdx.x); i < kSide * kSide; i += kThreads) {
    const int row = i / kSide, column = i % kSide;
    const bool inside = row < size && column < size;
    const int k = transposed ? column : row, n = transposed ? row : column;
    basis[row][column] = inside ? cosine(k, n, size) : 0;
  }
}

// This thread's results: rows kBlock * (thread / kAcross) + i, columns thread % kAcross + kAcross *
// j.
__device__ void multiply(const float (*a)[kPitch], const float (*b)[kPitch], int depth,
                         float (&sums)[kBlock][kBlock]) {
  const int row = int(threadIdx.x) / kAcross * kBlock, column = int(threadIdx.x) % kAcross;
  for (int i = 0; i < kBlock; ++i) {
    for (int j = 0; j < kBlock; ++j) sums[i][j] = 0;
  }
  for (int k = 0; k < depth; ++k) {
    float left[kBlock], right[kBlock];
#pragma unroll
    for (int i = 0; i < kBlock; ++i) left[i] = a[row + i][k];
#pragma unroll
    for (int j = 0; j < kBlock; ++j) right[j] = b[k][column + kAcross * j];
#pragma unroll
    for (int i = 0; i < kBlock; ++i) {
#pragma unroll
      for (int j = 0; j < kBlock; ++j) sums[i][j] += left[i] * right[j];
    }
  }
}

template <typename Store>
__device__ void for_results(const float (&sums)[kBlock][kBlock], const Store& store) {
  const int row = int(threadIdx.x) / kAcross * kBlock, column = int(threadIdx.x) % kAcross;
#pragma unroll
  for (int i = 0; i < kBlock; ++i) {
#pragma unroll
    for (int j = 0; j < kBlock; ++j) store(row + i, column + kAcross * j, sums[i][j]);
  }
}

// Offset of a tile's first element in the matrix.
__device__ int64_t tile_offset(const DctTiles& tiles, int64_t tile) {
  const int64_t across = tiles.columns / tiles.width;
  return tile / across * tiles.height * tiles.columns + tile % across * tiles.width;
}

// A thread block a tile, whose rows are adjacent in `to` or, if not kToTiles, in `from`.
template <bool kToTiles>
__global__ void __launch_bounds__(kThreads)
    copy_tiles_kernel(const DctTiles tiles, const float* from, float* to) {
  const int64_t tile = blockIdx.x, matrix = tile_offset(tiles, tile);
  const int elements = tiles.height * tiles.width;
  for (int i = int(threadIdx.x); i < elements; i += kThreads) {
    const int64_t at = matrix + i / tiles.width * tiles.columns + i % tiles.width;
    const int64_t packed = tile * elements + i;
    to[kToTiles ? packed : at] = from[kToTiles ? at : packed];
  }
}

// out = scale x left x tile x right.
template <bool kForward>
__global__ void __launch_bounds__(kThreads)
    dct_kernel(const DctTiles tiles, float scale, const float* from, float* to) {
  __shared__ float x[kSide][kPitch], basis[kSide][kPitch];
  const int64_t tile = blockIdx.x, matrix = tile_offset(tiles, tile);
  const int64_t packed = tile * tiles.height * tiles.width;
  from += kForward ? matrix : packed;
  to += kForward ? packed : matrix;
  const int64_t from_stride = kForward ? tiles.columns : tiles.width;
  const int64_t to_stride = kForward ? tiles.width : tiles.columns;
  for (int i = int(threadIdx.x); i < kSide * kSide; i += kThreads) {
    const int row = i / kSide, column = i % kSide;
    const bool inside = row < tiles.height && column < tiles.width;
    x[row][column] = inside ? from[row * from_stride + column] : 0;
  }
  make_basis(basis, tiles.width, kForward);
  __syncthreads();
  float sums[kBlock][kBlock];
  multiply(x, basis, tiles.width, sums);
  __syncthreads();
  for_results(sums, [&](int row, int column, float value) { x[row][column] = value; });
  make_basis(basis, tiles.height, !kForward);
  __syncthreads();
  multiply(basis, x, tiles.height, sums);
  for_results(sums, [&](int row, int column, float value) {
    if (row >= tiles.height || column >= tiles.width) return;
    to[row * to_stride + column] = scale * value;
  });
}

}  // namespace

void dct_forward(cudaStream_t stream, const DctTiles& tiles, float scale, const Tensor& x,
                 const Tensor& coefficients) {
  dct_kernel<true><<<unsigned(tiles.tiles()), kThreads, 0, stream>>>(
      tiles, scale, x.as<const float>(), coefficients.as<float>());
  check_launch("dct_kernel");
}

void dct_inverse(cudaStream_t stream, const DctTiles& tiles, const Tensor& coefficients,
                 const Tensor& x) {
  dct_kernel<false><<<unsigned(tiles.tiles()), kThreads, 0, stream>>>(
      tiles, 1, coefficients.as<const float>(), x.as<float>());
  check_launch("dct_kernel");
}

void to_tiles(cudaStream_t stream, const DctTiles& tiles, const Tensor& x, const Tensor& packed) {
  copy_tiles_kernel<true><<<unsigned(tiles.tiles()), kThreads, 0, stream>>>(
      tiles, x.as<const float>(), packed.as<float>());
  check_launch("copy_tiles_kernel");
}

void from_tiles(cudaStream_t stream, const DctTiles& tiles, const Tensor& packed, const Tensor& x) {
  copy_tiles_kernel<false><<<unsigned(tiles.tiles()), kThreads, 0, stream>>>(
      tiles, packed.as<const float>(), x.as<float>());
  check_launch("copy_tiles_kernel");
}

}  // namespace tandem::gpu
