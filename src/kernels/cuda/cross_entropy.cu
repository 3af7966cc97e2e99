#include <cfloat>

#include "core/cuda/load_module.cuh"
#include "kernels/cuda/kernels.h"
#include "kernels/cuda/rows.cuh"

namespace tandem::gpu {
namespace {

constexpr unsigned kReduceThreads = 512;

// Combines body(i) over the row's vectors of this thread, then of the block.
template <typename Combine, typename Body>
__device__ float reduce_row(float start, int64_t vectors, const Combine& combine,
                            const Body& body) {
  float result = start;
#pragma unroll 4
  for (int64_t i = threadIdx.x; i < vectors; i += blockDim.x) result = combine(result, body(i));
  return combine_block(result, combine);
}

template <int kWidth>
__global__ void __launch_bounds__(kReduceThreads)
    cross_entropy_max_kernel(Rows<float, kWidth> logits, int64_t vectors, float* maxima) {
  const int64_t row = blockIdx.x;
  const float largest = reduce_row(-FLT_MAX, vectors, Larger{}, [&](int64_t i) {
    const Vector<float, kWidth> x = logits.load(row, i);
    float result = x.at[0];
#pragma unroll
    for (int e = 1; e < kWidth; ++e) result = fmaxf(result, x.at[e]);
    return result;
  });
  if (threadIdx.x == 0) maxima[row] = largest;
}

template <int kWidth>
__global__ void __launch_bounds__(kReduceThreads)
    cross_entropy_sum_kernel(Rows<float, kWidth> logits, int64_t columns, const int32_t* targets,
                             int64_t begin, const float* maxima, float* sums, float* picked) {
  const int64_t row = blockIdx.x;
  const float largest = maxima[row];
  const float sum = reduce_row(0, columns / kWidth, Plus{}, [&](int64_t i) {
    const Vector<float, kWidth> x = logits.load(row, i);
    float result = 0;
#pragma unroll
    for (int e = 0; e < kWidth; ++e) result += clamped_exp(x.at[e] - largest);
    return result;
  });
  if (threadIdx.x != 0) return;
  sums[row] = sum;
  const int32_t target = targets[row];
  const int64_t column = target - begin;
  const bool local = target >= 0 && column >= 0 && column < columns;
  picked[row] = local ? logits.data[row * logits.stride + column] - largest : 0.0f;
}

constexpr int kRowVectors = 16;  // max vectors of a row that a thread keeps for both steps

// Both steps of a row that a block's registers hold, with the same order of additions.
template <int kWidth>
__global__ void __launch_bounds__(kReduceThreads)
    cross_entropy_max_and_sum_kernel(Rows<float, kWidth> logits, int64_t columns,
                                     const int32_t* targets, float* maxima, float* sums,
                                     float* picked) {
  __shared__ WarpValues warp_values[2];
  const int64_t row = blockIdx.x;
  Vector<float, kWidth> kept[kRowVectors];
  const auto for_each_vector = [&](const auto& body) {
#pragma unroll
    for (int k = 0; k < kRowVectors; ++k) {
      const int i = int(threadIdx.x + k * blockDim.x);
      if (i < int(columns / kWidth)) body(k, i);
    }
  };
  for_each_vector([&](int k, int i) { kept[k] = logits.load(row, i); });
  float largest = -FLT_MAX;
  for_each_vector([&](int k, int) {
#pragma unroll
    for (int e = 0; e < kWidth; ++e) largest = fmaxf(largest, kept[k].at[e]);
  });
  largest = combine_block(largest, Larger{}, warp_values[0]);
  float sum = 0;
  for_each_vector([&](int k, int) {
    float result = 0;
#pragma unroll
    for (int e = 0; e < kWidth; ++e) result += clamped_exp(kept[k].at[e] - largest);
    sum += result;
  });
  sum = combine_block(sum, Plus{}, warp_values[1]);
  if (threadIdx.x != 0) return;
  maxima[row] = largest;
  sums[row] = sum;
  const int32_t target = targets[row];
  const bool has_target = target >= 0 && target < columns;
  picked[row] = has_target ? logits.data[row * logits.stride + target] - largest : 0.0f;
}

constexpr int kLossThreads = 1024;

__global__ void __launch_bounds__(kLossThreads)
    cross_entropy_loss_kernel(const int32_t* targets, const float* sums, const float* picked,
                              int64_t rows, double* total) {
  __shared__ double of_thread[kLossThreads];
  double loss = 0;
  for (int64_t row = threadIdx.x; row < rows; row += kLossThreads) {
    if (targets[row] >= 0) loss += log(double(sums[row])) - double(picked[row]);
  }
  of_thread[threadIdx.x] = loss;
  for (unsigned half = kLossThreads / 2; half; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half) of_thread[threadIdx.x] += of_thread[threadIdx.x + half];
  }
  if (threadIdx.x == 0) *total += of_thread[0];
}

template <typename T, int kWidth>
struct CrossEntropyBackward {
  Rows<float, kWidth> logits;
  Rows<T, kWidth> dlogits;
  const int32_t* targets;
  const float *maxima, *sums;
  int64_t begin;
  float scale;

  using Loaded = Vector<float, kWidth>;
  __device__ Loaded load(int64_t row, int64_t i) const { return logits.load(row, i); }
  __device__ void store(int64_t row, int64_t i, const Loaded& x) const {
    const int32_t target = targets[row];
    const int64_t own = target - begin;
    const float largest = maxima[row], factor = __fdiv_rn(scale, sums[row]);
    Vector<T, kWidth> result;
#pragma unroll
    for (int e = 0; e < kWidth; ++e) {
      const float softmax = factor * clamped_exp(x.at[e] - largest);
      const float gradient = i * kWidth + e == own ? softmax - scale : softmax;
      result.at[e] = from_float<T>(target < 0 ? 0.0f : gradient);
    }
    dlogits.store(row, i, result);
  }
};

// Threads for a row that is read once.
unsigned reduce_threads(int64_t vectors) {
  return unsigned(std::clamp((vectors + 31) / 32 * 32, int64_t(32), int64_t(kReduceThreads)));
}

}  // namespace

void cross_entropy_max(cudaStream_t stream, const Tensor& logits, const Tensor& maxima) {
  require_dtype("cross_entropy_max: logits", logits, DType::f32);
  require_dtype("cross_entropy_max: maxima", maxima, DType::f32);
  if (logits.dim(0) == 0) return;
  with_width<4>({&logits}, [&](auto width) {
    const int64_t vectors = logits.dim(1) / width();
    cross_entropy_max_kernel<<<unsigned(logits.dim(0)), reduce_threads(vectors), 0, stream>>>(
        Rows<float, width()>(logits), vectors, maxima.as<float>());
    check_launch("cross_entropy_max_kernel");
  });
}

void cross_entropy_sum(cudaStream_t stream, const Tensor& logits, const Tensor& targets,
                       int64_t begin, const Tensor& maxima, const Tensor& sums,
                       const Tensor& picked) {
  require_dtype("cross_entropy_sum: logits", logits, DType::f32);
  require_dtype("cross_entropy_sum: targets", targets, DType::i32);
  require_dtype("cross_entropy_sum: maxima", maxima, DType::f32);
  require_dtype("cross_entropy_sum: sums", sums, DType::f32);
  require_dtype("cross_entropy_sum: picked", picked, DType::f32);
  if (logits.dim(0) == 0) return;
  with_width<4>({&logits}, [&](auto width) {
    const int64_t columns = logits.dim(1);
    const unsigned threads = reduce_threads(columns / width());
    cross_entropy_sum_kernel<<<unsigned(logits.dim(0)), threads, 0, stream>>>(
        Rows<float, width()>(logits), columns, targets.as<int32_t>(), begin, maxima.as<float>(),
        sums.as<float>(), picked.as<float>());
    check_launch("cross_entropy_sum_kernel");
  });
}

void cross_entropy_max_and_sum(cudaStream_t stream, const Tensor& logits, const Tensor& targets,
                               const Tensor& maxima, const Tensor& sums, const Tensor& picked) {
  bool is_short = false;
  with_width<4>({&logits}, [&](auto width) {
    is_short = logits.dim(1) <= int64_t(width()) * kRowVectors * kReduceThreads;
  });
  if (!is_short) {
    cross_entropy_max(stream, logits, maxima);
    cross_entropy_sum(stream, logits, targets, 0, maxima, sums, picked);
    return;
  }
  require_dtype("cross_entropy_max_and_sum: logits", logits, DType::f32);
  require_dtype("cross_entropy_max_and_sum: targets", targets, DType::i32);
  require_dtype("cross_entropy_max_and_sum: maxima", maxima, DType::f32);
  require_dtype("cross_entropy_max_and_sum: sums", sums, DType::f32);
  require_dtype("cross_entropy_max_and_sum: picked", picked, DType::f32);
  if (logits.dim(0) == 0) return;
  with_width<4>({&logits}, [&](auto width) {
    const unsigned threads = reduce_threads(logits.dim(1) / width());
    cross_entropy_max_and_sum_kernel<<<unsigned(logits.dim(0)), threads, 0, stream>>>(
        Rows<float, width()>(logits), logits.dim(1), targets.as<int32_t>(), maxima.as<float>(),
        sums.as<float>(), picked.as<float>());
    check_launch("cross_entropy_max_and_sum_kernel");
  });
}

void cross_entropy_loss(cudaStream_t stream, const Tensor& targets, const Tensor& sums,
                        const Tensor& picked, const Tensor& total) {
  require_dtype("cross_entropy_loss: targets", targets, DType::i32);
  require_dtype("cross_entropy_loss: sums", sums, DType::f32);
  require_dtype("cross_entropy_loss: picked", picked, DType::f32);
  require_dtype("cross_entropy_loss: total", total, DType::u8);
  require_shape("cross_entropy_loss: total", total, {sizeof(double)});
  if (targets.elements() == 0) return;
  cross_entropy_loss_kernel<<<1, kLossThreads, 0, stream>>>(targets.as<int32_t>(), sums.as<float>(),
                                                            picked.as<float>(), targets.elements(),
                                                            total.as<double>());
  check_launch("cross_entropy_loss_kernel");
}

void cross_entropy_backward(cudaStream_t stream, const Tensor& logits, const Tensor& targets,
                            int64_t begin, const Tensor& maxima, const Tensor& sums, float scale,
                            const Tensor& dlogits) {
  require_dtype("cross_entropy_backward: logits", logits, DType::f32);
  require_dtype("cross_entropy_backward: targets", targets, DType::i32);
  require_dtype("cross_entropy_backward: maxima", maxima, DType::f32);
  require_dtype("cross_entropy_backward: sums", sums, DType::f32);
  with_element("cross_entropy_backward: dlogits", dlogits, [&]<typename T>(T) {
    with_width<4>({&logits, &dlogits}, [&](auto width) {
      launch_map("cross_entropy_backward",
                 CrossEntropyBackward<T, width()>{
                     Rows<float, width()>(logits), Rows<T, width()>(dlogits), targets.as<int32_t>(),
                     maxima.as<float>(), sums.as<float>(), begin, scale},
                 logits.dim(0), logits.dim(1) / width(), stream);
    });
  });
}

}  // namespace tandem::gpu
