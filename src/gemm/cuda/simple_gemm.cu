#include "gemm/cuda/simple_gemm.h"

#include "core/cuda/check.h"
#include "core/cuda/element.cuh"
#include "core/cuda/load_module.cuh"

namespace tandem::gpu {
namespace {

constexpr int kTile = 64, kStep = 16;  // per block: rows and columns of the result, and K
constexpr int kThreads = 256, kPerThread = 4;
static_assert(kThreads * kPerThread * kPerThread == kTile * kTile);

/// Operand [rows, K], contiguous in either dimension.
template <typename T>
struct Operand {
  const T* data;
  int64_t rows, row_step, k_step;
  __device__ float at(int64_t row, int64_t k, int64_t all_k) const {
    return row < rows && k < all_k ? to_float(data[row * row_step + k * k_step]) : 0;
  }
};

template <typename In, typename Out>
__global__ void __launch_bounds__(kThreads)
    simple_gemm_kernel(Operand<In> x, Operand<In> weight, Out* out, const Out* bias, int64_t k,
                       bool accumulate) {
  __shared__ float x_tile[kStep][kTile + 1], weight_tile[kStep][kTile + 1];
  const int64_t first_row = int64_t(blockIdx.y) * kTile, first_column = int64_t(blockIdx.x) * kTile;
  const int thread = int(threadIdx.x), across = thread % (kTile / kPerThread),
            down = thread / (kTile / kPerThread);
  float sums[kPerThread][kPerThread] = {};
  for (int64_t begin = 0; begin < k; begin += kStep) {
    for (int i = thread; i < kStep * kTile; i += kThreads) {
      const int row = i / kStep, at = i % kStep;
      x_tile[at][row] = x.at(first_row + row, begin + at, k);
      weight_tile[at][row] = weight.at(first_column + row, begin + at, k);
    }
    __syncthreads();
#pragma unroll
    for (int at = 0; at < kStep; ++at) {
#pragma unroll
      for (int r = 0; r < kPerThread; ++r) {
#pragma unroll
        for (int c = 0; c < kPerThread; ++c) {
          sums[r][c] = fmaf(x_tile[at][down * kPerThread + r],
                            weight_tile[at][across * kPerThread + c], sums[r][c]);
        }
      }
    }
    __syncthreads();
  }
  for (int r = 0; r < kPerThread; ++r) {
    const int64_t row = first_row + down * kPerThread + r;
    for (int c = 0; c < kPerThread; ++c) {
      const int64_t column = first_column + across * kPerThread + c;
      if (row >= x.rows || column >= weight.rows) continue;
      Out& to = out[row * weight.rows + column];
      float value = sums[r][c];
      if (bias) value += to_float(bias[column]);
      if (accumulate) value += to_float(to);
      to = from_float<Out>(value);
    }
  }
}

template <typename In, typename Out>
void launch(const GemmShape& s, const void* x, const void* weight, void* out, const void* bias,
            cudaStream_t stream) {
  const Operand<In> rows{static_cast<const In*>(x), s.m, s.x_is_km ? 1 : s.k, s.x_is_km ? s.m : 1},
      columns{static_cast<const In*>(weight), s.n, s.weight_is_kn ? 1 : s.k,
              s.weight_is_kn ? s.n : 1};
  const dim3 grid(unsigned((s.n + kTile - 1) / kTile), unsigned((s.m + kTile - 1) / kTile));
  simple_gemm_kernel<In, Out><<<grid, kThreads, 0, stream>>>(
      rows, columns, static_cast<Out*>(out), static_cast<const Out*>(bias), s.k, s.accumulate);
  check_launch("simple_gemm_kernel");
}

}  // namespace

bool simple_gemm_takes(const GemmShape& shape) {
  return shape.in != DType::e4m3;
}

void launch_simple_gemm(const GemmShape& shape, const void* x, const void* weight, void* out,
                        const void* bias, cudaStream_t stream) {
  const auto with_in = [&]<typename In>(In) {
    if (shape.out == DType::f32) {
      launch<In, float>(shape, x, weight, out, shape.bias ? bias : nullptr, stream);
    } else {
      launch<In, In>(shape, x, weight, out, shape.bias ? bias : nullptr, stream);
    }
  };
  switch (shape.in) {
    case DType::f32:
      return with_in(float{});
    case DType::bf16:
      return with_in(__nv_bfloat16{});
    case DType::f16:
      return with_in(__half{});
    case DType::e4m3:
    case DType::i32:
    case DType::u8:
      break;
  }
  throw InvalidArgument("gemm: the simple kernel: expected f32, bf16 or f16");
}

}  // namespace tandem::gpu
