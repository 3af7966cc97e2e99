#include "codec/cuda/quantize.h"

#include "core/cuda/check.h"
#include "core/cuda/load_module.cuh"
#include "core/cuda/quantize_row.cuh"

namespace tandem::gpu {
namespace {

constexpr int kThreads = 256;

// Max over the thread block, in every thread. Ignores NaN, as fmaxf does.
__device__ float block_max(float value) {
  __shared__ float of_warp[kThreads / 32];
  for (int offset = 16; offset; offset /= 2) {
    value = fmaxf(value, __shfl_xor_sync(~0u, value, offset));
  }
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = value;
  __syncthreads();
  for (int w = 0; w < kThreads / 32; ++w) value = fmaxf(value, of_warp[w]);
  return value;
}

// Blocks of an SM for which quantize_rows_kernel has registers: enough bytes are in flight then.
constexpr int min_blocks(int cached) {
  return cached == 1 ? 5 : cached == 2 ? 4 : 2;
}

// One thread block per row. The first kCached x kThreads groups stay in registers, the others are
// read again, from the cache.
template <typename T, int kCached>
__global__ void __launch_bounds__(kThreads, min_blocks(kCached))
    quantize_rows_kernel(const T* x, __nv_fp8_e4m3* codes, float* scales, int64_t columns) {
  const int64_t row = blockIdx.x;
  const auto* in = reinterpret_cast<const Sixteen<T>*>(x + row * columns);
  auto* out = reinterpret_cast<Sixteen<__nv_fp8_e4m3>*>(codes + row * columns);
  const int64_t groups = columns / kCodesAtOnce;
  Sixteen<T> cached[kCached];
  float maximum = 0;
#pragma unroll
  for (int h = 0; h < kCached; ++h) {
    const int64_t i = threadIdx.x + int64_t(h) * kThreads;
    if (i < groups) cached[h] = in[i];
    if (i < groups) maximum = largest(maximum, cached[h]);
  }
  const int64_t first = threadIdx.x + int64_t(kCached) * kThreads;
  for (int64_t i = first; i < groups; i += kThreads) {
    const Sixteen<T> group = in[i];
    maximum = largest(maximum, group);
  }
  const float scale = row_scale(block_max(maximum));
  if (threadIdx.x == 0) scales[row] = scale;
#pragma unroll
  for (int h = 0; h < kCached; ++h) {
    const int64_t i = threadIdx.x + int64_t(h) * kThreads;
    if (i < groups) out[i] = quantized(cached[h], scale);
  }
  for (int64_t i = first; i < groups; i += kThreads) {
    const Sixteen<T> group = in[i];
    out[i] = quantized(group, scale);
  }
}

template <typename T, int kCached>
void launch_rows(const Tensor& x, const Tensor& codes, const Tensor& scales, cudaStream_t stream) {
  quantize_rows_kernel<T, kCached><<<unsigned(x.dim(0)), kThreads, 0, stream>>>(
      x.as<const T>(), codes.as<__nv_fp8_e4m3>(), scales.as<float>(), x.dim(1));
  check_launch("quantize_rows_kernel");
}

// Quantization of columns: a thread's 16-byte vectors are of kColumns columns, and 8 threads cover
// the 64 columns of a tile.
constexpr int kColumns = 8, kTileColumns = 64, kAcross = kTileColumns / kColumns;
constexpr int kRowsAtOnce = kThreads / kAcross;
constexpr int kLoads = 4;            // of a thread at once
constexpr int kRowsOfMaximum = 512;  // of one thread block of column_maxima_kernel
using Vector = Vec<__nv_bfloat16>;

// maxima[column] = max(maxima[column], absmax of the block's rows): the maximum has no order. A
// maximum is not negative, so that its bits are ordered as an integer.
__global__ void __launch_bounds__(kThreads)
    column_maxima_kernel(const __nv_bfloat16* x, float* maxima, int64_t rows, int64_t columns) {
  __shared__ int of_tile[kTileColumns];
  if (threadIdx.x < kTileColumns) of_tile[threadIdx.x] = 0;
  __syncthreads();
  const int in_tile = int(threadIdx.x) % kAcross * kColumns;
  const int64_t column = int64_t(blockIdx.x) * kTileColumns + in_tile;
  const int64_t begin = int64_t(blockIdx.y) * kRowsOfMaximum + threadIdx.x / kAcross;
  const int64_t end = min((int64_t(blockIdx.y) + 1) * kRowsOfMaximum, rows);
  float maximum[kColumns] = {};
  for (int64_t row = begin; row < end && column < columns; row += kLoads * kRowsAtOnce) {
    Vector values[kLoads];
#pragma unroll
    for (int l = 0; l < kLoads; ++l) {  // the last row may be read again
      const int64_t at = min(row + l * kRowsAtOnce, end - 1);
      values[l] = *reinterpret_cast<const Vector*>(x + at * columns + column);
    }
#pragma unroll
    for (int i = 0; i < kColumns * kLoads; ++i) {
      const float value = to_float(values[i / kColumns].at[i % kColumns]);
      maximum[i % kColumns] = fmaxf(maximum[i % kColumns], fabsf(value));
    }
  }
#pragma unroll
  for (int i = 0; i < kColumns; ++i) {
    for (int offset = kAcross; offset < 32; offset *= 2) {
      maximum[i] = fmaxf(maximum[i], __shfl_xor_sync(~0u, maximum[i], offset));
    }
    if (threadIdx.x % 32 < kAcross) atomicMax(&of_tile[in_tile + i], __float_as_int(maximum[i]));
  }
  __syncthreads();
  const int64_t of_thread = int64_t(blockIdx.x) * kTileColumns + threadIdx.x;
  if (threadIdx.x >= kTileColumns || of_thread >= columns) return;
  atomicMax(reinterpret_cast<int*>(maxima) + of_thread, of_tile[threadIdx.x]);
}

// In place.
__global__ void __launch_bounds__(kThreads) scales_of_maxima_kernel(float* maxima, int64_t count) {
  const int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (i < count) maxima[i] = row_scale(maxima[i]);
}

// One thread block per tile of 128 rows and 64 columns. A thread reads 4 rows of 8 columns, whose
// codes are a word of each column in shared memory, and writes 16 codes of a column at once.
constexpr int kTileRows = 128, kWord = 4;
constexpr int kStride = kTileRows / kWord + 1;  // words; the last one keeps banks apart

__global__ void __launch_bounds__(kThreads)
    quantize_columns_kernel(const __nv_bfloat16* x, const float* scales, uint32_t* codes,
                            int64_t rows, int64_t columns) {
  __shared__ uint32_t words[kTileColumns * kStride];
  const int in_tile = int(threadIdx.x) % kAcross * kColumns;
  const int word = int(threadIdx.x) / kAcross;
  const int64_t column = int64_t(blockIdx.x) * kTileColumns + in_tile;
  const int64_t first_row = int64_t(blockIdx.y) * kTileRows;
  const int64_t row = first_row + word * kWord;
  if (row < rows && column < columns) {
    Vector values[kWord];
#pragma unroll
    for (int r = 0; r < kWord; ++r) {
      values[r] = *reinterpret_cast<const Vector*>(x + (row + r) * columns + column);
    }
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      const float scale = scales[column + i];
      const auto value = [&](int r) { return __fdiv_rn(to_float(values[r].at[i]), scale); };
      words[(in_tile + i) * kStride + word] =
          code_pair(value(0), value(1)) | uint32_t(code_pair(value(2), value(3))) << 16;
    }
  }
  __syncthreads();
  constexpr int kWords = 4, kVectors = kTileRows / (kWord * kWords);
  for (int i = int(threadIdx.x); i < kTileColumns * kVectors; i += kThreads) {
    const int tile_column = i / kVectors, vector = i % kVectors;
    const int64_t to = int64_t(blockIdx.x) * kTileColumns + tile_column;
    const int64_t from = first_row + vector * kWord * kWords;
    if (to >= columns || from >= rows) continue;
    const uint32_t* const four = words + tile_column * kStride + vector * kWords;
    reinterpret_cast<uint4*>(codes)[(to * rows + from) / (kWord * kWords)] =
        make_uint4(four[0], four[1], four[2], four[3]);
  }
}

}  // namespace

void launch_quantize_rows(const Tensor& x, const Tensor& codes, const Tensor& scales,
                          cudaStream_t stream) {
  if (x.dim(0) == 0) return;
  with_float_type(x.dtype(), [&]<typename T>(T) {
    const int64_t groups = x.dim(1) / kCodesAtOnce;
    if (groups <= kThreads) return launch_rows<T, 1>(x, codes, scales, stream);
    if (groups <= 2 * kThreads) return launch_rows<T, 2>(x, codes, scales, stream);
    launch_rows<T, 4>(x, codes, scales, stream);
  });
}

void launch_quantize_columns(const Tensor& x, const Tensor& codes, const Tensor& scales,
                             cudaStream_t stream) {
  const int64_t rows = x.dim(0), columns = x.dim(1);
  if (columns == 0) return;
  const auto blocks = [](int64_t count, int64_t of) { return unsigned((count + of - 1) / of); };
  check(cudaMemsetAsync(scales.data(), 0, scales.bytes(), stream), "clear the maxima");
  const unsigned across = blocks(columns, kTileColumns);
  if (rows > 0) {
    column_maxima_kernel<<<dim3(across, blocks(rows, kRowsOfMaximum)), kThreads, 0, stream>>>(
        x.as<const __nv_bfloat16>(), scales.as<float>(), rows, columns);
    check_launch("column_maxima_kernel");
  }
  scales_of_maxima_kernel<<<blocks(columns, kThreads), kThreads, 0, stream>>>(scales.as<float>(),
                                                                              columns);
  check_launch("scales_of_maxima_kernel");
  if (rows == 0) return;
  quantize_columns_kernel<<<dim3(across, blocks(rows, kTileRows)), kThreads, 0, stream>>>(
      x.as<const __nv_bfloat16>(), scales.as<const float>(), codes.as<uint32_t>(), rows, columns);
  check_launch("quantize_columns_kernel");
}

}  // namespace tandem::gpu
