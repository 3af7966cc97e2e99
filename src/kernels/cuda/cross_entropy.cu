#include <cfloat>

#include "core/cuda/load_module.cuh"
#include "kernels/cuda/kernels.h"
#include "kernels/cuda/rows.cuh"

namespace tandem::gpu {
namespace {

constexpr unsigned kShortThreads = 512;  // of a row that their registers hold
constexpr unsigned kLongThreads = 1024;
constexpr int kRowVectors = 16;  // max vectors of a row that a thread keeps

// Combines body(i) over the row's vectors of this thread, then of the block.
template <typename Combine, typename Body>
__device__ float reduce_row(float start, int64_t vectors, const Combine& combine,
                            const Body& body) {
  float result = start;
#pragma unroll 4
  for (int64_t i = threadIdx.x; i < vectors; i += blockDim.x) result = combine(result, body(i));
  return combine_block(result, combine);
}

template <typename T, int kWidth>
__device__ float vector_max(const Vector<T, kWidth>& x) {
  float result = to_float(x.at[0]);
#pragma unroll
  for (int e = 1; e < kWidth; ++e) result = fmaxf(result, to_float(x.at[e]));
  return result;
}

template <typename T, int kWidth>
__device__ float sum_exponentials(const Vector<T, kWidth>& x, float largest) {
  float result = 0;
#pragma unroll
  for (int e = 0; e < kWidth; ++e) result += clamped_exp(to_float(x.at[e]) - largest);
  return result;
}

template <typename T, int kWidth>
__device__ float row_max(const Rows<T, kWidth>& logits, int64_t row, int64_t vectors) {
  return reduce_row(-FLT_MAX, vectors, Larger{},
                    [&](int64_t i) { return vector_max(logits.load(row, i)); });
}

template <typename T, int kWidth>
__device__ float row_sum(const Rows<T, kWidth>& logits, int64_t row, int64_t vectors,
                         float largest) {
  return reduce_row(0, vectors, Plus{},
                    [&](int64_t i) { return sum_exponentials(logits.load(row, i), largest); });
}

/// The logit of the row's target minus `largest` if it is one of the columns [begin, begin +
/// columns), else 0.
template <typename T, int kWidth>
__device__ float pick(const Rows<T, kWidth>& logits, int64_t row, int64_t columns, int32_t target,
                      int64_t begin, float largest) {
  const int64_t column = target - begin;
  const bool local = target >= 0 && column >= 0 && column < columns;
  return local ? to_float(logits.data[row * logits.stride + column]) - largest : 0.0f;
}

template <typename T, int kWidth>
__global__ void __launch_bounds__(kLongThreads)
    cross_entropy_max_kernel(Rows<T, kWidth> logits, int64_t vectors, float* maxima) {
  const int64_t row = blockIdx.x;
  const float largest = row_max(logits, row, vectors);
  if (threadIdx.x == 0) maxima[row] = largest;
}

template <typename T, int kWidth>
__global__ void __launch_bounds__(kLongThreads)
    cross_entropy_sum_kernel(Rows<T, kWidth> logits, int64_t columns, const int32_t* targets,
                             int64_t begin, const float* maxima, float* sums, float* picked) {
  const int64_t row = blockIdx.x;
  const float largest = maxima[row];
  const float sum = row_sum(logits, row, columns / kWidth, largest);
  if (threadIdx.x != 0) return;
  sums[row] = sum;
  picked[row] = pick(logits, row, columns, targets[row], begin, largest);
}

// Both steps of a long row, with the same order of additions. The second reads it from the L2
// cache, which holds the rows of one block an SM.
template <typename T, int kWidth>
__global__ void __launch_bounds__(kLongThreads, 1)
    cross_entropy_long_kernel(Rows<T, kWidth> logits, int64_t columns, const int32_t* targets,
                              float* maxima, float* sums, float* picked) {
  const int64_t row = blockIdx.x;
  const float largest = row_max(logits, row, columns / kWidth);
  const float sum = row_sum(logits, row, columns / kWidth, largest);
  if (threadIdx.x != 0) return;
  maxima[row] = largest;
  sums[row] = sum;
  picked[row] = pick(logits, row, columns, targets[row], 0, largest);
}

// Both steps of a row that a block's registers hold, with the same order of additions.
template <typename T, int kWidth>
__global__ void __launch_bounds__(kShortThreads)
    cross_entropy_short_kernel(Rows<T, kWidth> logits, int64_t columns, const int32_t* targets,
                               float* maxima, float* sums, float* picked) {
  __shared__ WarpValues warp_values[2];
  const int64_t row = blockIdx.x;
  PackedVector<T, kWidth> cached[kRowVectors];
  const auto for_each_vector = [&](const auto& body) {
#pragma unroll
    for (int k = 0; k < kRowVectors; ++k) {
      const int i = int(threadIdx.x + k * blockDim.x);
      if (i < int(columns / kWidth)) body(k, i);
    }
  };
  for_each_vector([&](int k, int i) { cached[k] = logits.load_packed(row, i); });
  float largest = -FLT_MAX;
  for_each_vector([&](int k, int) { largest = fmaxf(largest, vector_max(cached[k].unpack())); });
  largest = combine_block(largest, Larger{}, warp_values[0]);
  float sum = 0;
  for_each_vector([&](int k, int) { sum += sum_exponentials(cached[k].unpack(), largest); });
  sum = combine_block(sum, Plus{}, warp_values[1]);
  if (threadIdx.x != 0) return;
  maxima[row] = largest;
  sums[row] = sum;
  picked[row] = pick(logits, row, columns, targets[row], 0, largest);
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

template <typename In, typename Out, int kWidth>
struct CrossEntropyBackward {
  Rows<In, kWidth> logits;
  Rows<Out, kWidth> dlogits;
  const int32_t* targets;
  const float *maxima, *sums;
  int64_t begin;
  float scale;

  using Loaded = Vector<In, kWidth>;
  __device__ Loaded load(int64_t row, int64_t i) const { return logits.load(row, i); }
  __device__ void store(int64_t row, int64_t i, const Loaded& x) const {
    const int32_t target = targets[row];
    const int64_t column = target - begin;
    const float largest = maxima[row], factor = __fdiv_rn(scale, sums[row]);
    Vector<Out, kWidth> result;
#pragma unroll
    for (int e = 0; e < kWidth; ++e) {
      const float softmax = factor * clamped_exp(to_float(x.at[e]) - largest);
      const float gradient = i * kWidth + e == column ? softmax - scale : softmax;
      result.at[e] = from_float<Out>(target < 0 ? 0.0f : gradient);
    }
    dlogits.store(row, i, result);
  }
};

// Whether a block's registers hold a row of so many vectors.
bool is_short(int64_t vectors) {
  return vectors <= int64_t(kRowVectors) * kShortThreads;
}

unsigned reduce_threads(int64_t vectors) {
  if (!is_short(vectors)) return kLongThreads;
  return unsigned(std::clamp((vectors + 31) / 32 * 32, int64_t(32), int64_t(kShortThreads)));
}

// Calls body(Rows<T, kWidth>) of the logits.
template <typename Body>
void with_logits(const char* name, const Tensor& logits, const Body& body) {
  with_element(name, logits, [&]<typename T>(T) {
    constexpr int kWidth = 16 / int(sizeof(T));
    with_width<kWidth>({&logits}, [&](auto width) { body(Rows<T, width()>(logits), width); });
  });
}

}  // namespace

void cross_entropy_max(cudaStream_t stream, const Tensor& logits, const Tensor& maxima) {
  require_dtype("cross_entropy_max: maxima", maxima, DType::f32);
  if (logits.dim(0) == 0) return;
  with_logits("cross_entropy_max: logits", logits, [&](const auto& rows, auto width) {
    const int64_t vectors = logits.dim(1) / width();
    cross_entropy_max_kernel<<<unsigned(logits.dim(0)), reduce_threads(vectors), 0, stream>>>(
        rows, vectors, maxima.as<float>());
    check_launch("cross_entropy_max_kernel");
  });
}

void cross_entropy_sum(cudaStream_t stream, const Tensor& logits, const Tensor& targets,
                       int64_t begin, const Tensor& maxima, const Tensor& sums,
                       const Tensor& picked) {
  require_dtype("cross_entropy_sum: targets", targets, DType::i32);
  require_dtype("cross_entropy_sum: maxima", maxima, DType::f32);
  require_dtype("cross_entropy_sum: sums", sums, DType::f32);
  require_dtype("cross_entropy_sum: picked", picked, DType::f32);
  if (logits.dim(0) == 0) return;
  with_logits("cross_entropy_sum: logits", logits, [&](const auto& rows, auto width) {
    const int64_t columns = logits.dim(1);
    const unsigned threads = reduce_threads(columns / width());
    cross_entropy_sum_kernel<<<unsigned(logits.dim(0)), threads, 0, stream>>>(
        rows, columns, targets.as<int32_t>(), begin, maxima.as<float>(), sums.as<float>(),
        picked.as<float>());
    check_launch("cross_entropy_sum_kernel");
  });
}

void cross_entropy_max_and_sum(cudaStream_t stream, const Tensor& logits, const Tensor& targets,
                               const Tensor& maxima, const Tensor& sums, const Tensor& picked) {
  require_dtype("cross_entropy_max_and_sum: targets", targets, DType::i32);
  require_dtype("cross_entropy_max_and_sum: maxima", maxima, DType::f32);
  require_dtype("cross_entropy_max_and_sum: sums", sums, DType::f32);
  require_dtype("cross_entropy_max_and_sum: picked", picked, DType::f32);
  if (logits.dim(0) == 0) return;
  with_logits("cross_entropy_max_and_sum: logits", logits, [&](const auto& rows, auto width) {
    const int64_t columns = logits.dim(1), vectors = columns / width();
    const auto launch = [&](auto kernel) {
      kernel<<<unsigned(logits.dim(0)), reduce_threads(vectors), 0, stream>>>(
          rows, columns, targets.as<int32_t>(), maxima.as<float>(), sums.as<float>(),
          picked.as<float>());
    };
    using Element = std::remove_pointer_t<decltype(rows.data)>;
    if (is_short(vectors)) {
      launch(cross_entropy_short_kernel<Element, width()>);
    } else {
      launch(cross_entropy_long_kernel<Element, width()>);
    }
    check_launch("cross_entropy_max_and_sum");
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
  require_dtype("cross_entropy_backward: targets", targets, DType::i32);
  require_dtype("cross_entropy_backward: maxima", maxima, DType::f32);
  require_dtype("cross_entropy_backward: sums", sums, DType::f32);
  with_element("cross_entropy_backward: logits", logits, [&]<typename In>(In) {
    with_element("cross_entropy_backward: dlogits", dlogits, [&]<typename Out>(Out) {
      constexpr int kMaxWidth = 16 / int(std::max(sizeof(In), sizeof(Out)));
      with_width<kMaxWidth>({&logits, &dlogits}, [&](auto width) {
        launch_map("cross_entropy_backward",
                   CrossEntropyBackward<In, Out, width()>{
                       Rows<In, width()>(logits), Rows<Out, width()>(dlogits),
                       targets.as<int32_t>(), maxima.as<float>(), sums.as<float>(), begin, scale},
                   logits.dim(0), logits.dim(1) / width(), stream);
      });
    });
  });
}

}  // namespace tandem::gpu
