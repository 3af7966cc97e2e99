#include "core/cuda/load_module.cuh"
#include "kernels/cuda/kernels.h"
#include "kernels/cuda/rows.cuh"

namespace tandem::gpu {
namespace {

template <typename In, typename T, int kWidth>
__global__ void __launch_bounds__(kMaxRowThreads)
    rms_norm_kernel(Rows<In, kWidth> x, Rows<In, kWidth> weight, Rows<T, kWidth> out,
                    float* inverse_rms, int64_t vectors, float eps) {
  using Vec = Vector<In, kWidth>;
  const int64_t row = blockIdx.x;
  const auto squares_of = [](const Vec& values) {
    float squares = 0;
#pragma unroll
    for (int e = 0; e < kWidth; ++e) {
      const float value = to_float(values.at[e]);
      squares = fmaf(value, value, squares);
    }
    return squares;
  };
  Vec kept[kKeptVectors];
  for_each_kept(vectors, [&](int k, int64_t i) { kept[k] = x.load(row, i); });
  float squares = 0;
  for_each_kept(vectors, [&](int k, int64_t) { squares += squares_of(kept[k]); });
  for_each_further(vectors, [&](int64_t i) { squares += squares_of(x.load(row, i)); });
  const float mean = __fdiv_rn(combine_block(squares, Plus{}), float(vectors * kWidth));
  const float scale = __frsqrt_rn(mean + eps);
  if (inverse_rms && threadIdx.x == 0) inverse_rms[row] = scale;
  const auto write = [&](int64_t i, const Vec& values) {
    const Vec gain = weight.load(0, i);
    Vector<T, kWidth> result;
#pragma unroll
    for (int e = 0; e < kWidth; ++e) {
      result.at[e] = from_float<T>(to_float(values.at[e]) * scale * to_float(gain.at[e]));
    }
    out.store(row, i, result);
  };
  for_each_kept(vectors, [&](int k, int64_t i) { write(i, kept[k]); });
  for_each_further(vectors, [&](int64_t i) { write(i, x.load(row, i)); });
}

template <typename In, typename T, int kWidth>
void launch_rms_norm(const Tensor& x, const Tensor& weight, double eps, const Tensor& out,
                     float* inverse_rms, cudaStream_t stream) {
  const int64_t vectors = x.dim(1) / kWidth;
  rms_norm_kernel<<<unsigned(x.dim(0)), row_threads(vectors), 0, stream>>>(
      Rows<In, kWidth>(x), Rows<In, kWidth>(weight), Rows<T, kWidth>(out), inverse_rms, vectors,
      float(eps));
  check_launch("rms_norm_kernel");
}

template <typename T, int kWidth>
__global__ void __launch_bounds__(kMaxRowThreads)
    rms_norm_dx_kernel(Rows<float, kWidth> x, Rows<float, kWidth> weight, const float* inverse_rms,
                       Rows<T, kWidth> dout, Rows<float, kWidth> dx, int64_t vectors) {
  using Vec = Vector<float, kWidth>;
  const int64_t row = blockIdx.x;
  const auto load_weighted = [&](int64_t i) {  // dout times weight
    const Vector<T, kWidth> d = dout.load(row, i);
    const Vec w = weight.load(0, i);
    Vec result;
#pragma unroll
    for (int e = 0; e < kWidth; ++e) result.at[e] = to_float(d.at[e]) * w.at[e];
    return result;
  };
  const auto dot_of = [](const Vec& a, const Vec& b) {
    float dot = 0;
#pragma unroll
    for (int e = 0; e < kWidth; ++e) dot = fmaf(a.at[e], b.at[e], dot);
    return dot;
  };
  Vec kept_x[kKeptVectors], kept_d[kKeptVectors];
  for_each_kept(vectors, [&](int k, int64_t i) {
    kept_x[k] = x.load(row, i);
    kept_d[k] = load_weighted(i);
  });
  float dot = 0;
  for_each_kept(vectors, [&](int k, int64_t) { dot += dot_of(kept_d[k], kept_x[k]); });
  for_each_further(vectors, [&](int64_t i) { dot += dot_of(load_weighted(i), x.load(row, i)); });
  const float scale = inverse_rms[row];
  const float along =
      __fdiv_rn(combine_block(dot, Plus{}) * scale * scale, float(vectors * kWidth));
  const auto add_to_dx = [&](int64_t i, const Vec& d, const Vec& values) {
    Vec result = dx.load(row, i);
#pragma unroll
    for (int e = 0; e < kWidth; ++e) {
      result.at[e] += scale * (d.at[e] - values.at[e] * along);
    }
    dx.store(row, i, result);
  };
  for_each_kept(vectors, [&](int k, int64_t i) { add_to_dx(i, kept_d[k], kept_x[k]); });
  for_each_further(vectors, [&](int64_t i) { add_to_dx(i, load_weighted(i), x.load(row, i)); });
}

constexpr int kWeightThreads = 512;

// Each block sums a column range, blockDim.x vectors wide, over all rows: each thread every
// blockDim.y-th row, then the threads of a column as a tree. blockDim.y is a power of two.
template <typename T, int kWidth>
__global__ void __launch_bounds__(kWeightThreads)
    rms_norm_dweight_kernel(Rows<float, kWidth> x, const float* inverse_rms, Rows<T, kWidth> dout,
                            Rows<float, kWidth> dweight, int64_t rows, int64_t vectors) {
  __shared__ Vector<float, kWidth> sums[kWeightThreads];
  const int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  Vector<float, kWidth> sum{};
  if (i < vectors) {
#pragma unroll 4
    for (int64_t row = threadIdx.y; row < rows; row += blockDim.y) {
      const Vector<float, kWidth> values = x.load(row, i);
      const Vector<T, kWidth> d = dout.load(row, i);
      const float scale = inverse_rms[row];
#pragma unroll
      for (int e = 0; e < kWidth; ++e) sum.at[e] += to_float(d.at[e]) * values.at[e] * scale;
    }
  }
  const unsigned own = threadIdx.y * blockDim.x + threadIdx.x;
  sums[own] = sum;
  for (unsigned half = blockDim.y / 2; half; half /= 2) {
    __syncthreads();
    if (threadIdx.y >= half) continue;
#pragma unroll
    for (int e = 0; e < kWidth; ++e) sums[own].at[e] += sums[own + half * blockDim.x].at[e];
  }
  if (threadIdx.y != 0 || i >= vectors) return;
  Vector<float, kWidth> result = dweight.load(0, i);
#pragma unroll
  for (int e = 0; e < kWidth; ++e) result.at[e] += sums[own].at[e];
  dweight.store(0, i, result);
}

// Vectors across a block: 128 bytes of a row, less if that gives too few blocks.
unsigned dweight_lanes(int64_t vectors, int width) {
  constexpr int64_t kMinBlocks = 128;
  unsigned lanes = 32u / unsigned(width);
  while (lanes * unsigned(width) > 8 && (vectors - 1) / lanes + 1 < kMinBlocks) lanes /= 2;
  return lanes;
}

}  // namespace

void rms_norm_forward(cudaStream_t stream, const Tensor& x, const Tensor& weight, double eps,
                      const Tensor& out, const Tensor& inverse_rms) {
  require_dtype("rms_norm_forward: x", x, DType::f32);
  require_dtype("rms_norm_forward: weight", weight, DType::f32);
  require_dtype("rms_norm_forward: inverse_rms", inverse_rms, DType::f32);
  with_element("rms_norm_forward: out", out, [&]<typename T>(T) {
    if (x.elements() == 0) return;
    with_width<4>({&x, &weight, &out}, [&](auto width) {
      launch_rms_norm<float, T, width()>(x, weight, eps, out, inverse_rms.as<float>(), stream);
    });
  });
}

void rms_norm(cudaStream_t stream, const Tensor& x, const Tensor& weight, double eps,
              const Tensor& out) {
  with_element("rms_norm: out", out, [&]<typename T>(T) {
    require_dtype("rms_norm: x", x, out.dtype());
    require_dtype("rms_norm: weight", weight, out.dtype());
    if (x.elements() == 0) return;
    with_width<16 / int(sizeof(T))>({&x, &weight, &out}, [&](auto width) {
      launch_rms_norm<T, T, width()>(x, weight, eps, out, nullptr, stream);
    });
  });
}

void rms_norm_backward(cudaStream_t stream, const Tensor& x, const Tensor& weight,
                       const Tensor& inverse_rms, const Tensor& dout, const Tensor& dx,
                       const Tensor& dweight) {
  require_dtype("rms_norm_backward: x", x, DType::f32);
  require_dtype("rms_norm_backward: weight", weight, DType::f32);
  require_dtype("rms_norm_backward: inverse_rms", inverse_rms, DType::f32);
  require_dtype("rms_norm_backward: dx", dx, DType::f32);
  require_dtype("rms_norm_backward: dweight", dweight, DType::f32);
  with_element("rms_norm_backward: dout", dout, [&]<typename T>(T) {
    if (x.elements() == 0) return;
    with_width<4>({&x, &weight, &dout, &dx, &dweight}, [&](auto width) {
      constexpr int kWidth = width();
      const int64_t vectors = x.dim(1) / kWidth;
      const Rows<float, kWidth> x_rows(x);
      const Rows<T, kWidth> dout_rows(dout);
      rms_norm_dx_kernel<<<unsigned(x.dim(0)), row_threads(vectors), 0, stream>>>(
          x_rows, Rows<float, kWidth>(weight), inverse_rms.as<float>(), dout_rows,
          Rows<float, kWidth>(dx), vectors);
      check_launch("rms_norm_dx_kernel");
      const unsigned lanes = dweight_lanes(vectors, kWidth);
      rms_norm_dweight_kernel<<<unsigned((vectors - 1) / lanes + 1),
                                dim3(lanes, kWeightThreads / lanes), 0, stream>>>(
          x_rows, inverse_rms.as<float>(), dout_rows, Rows<float, kWidth>(dweight), x.dim(0),
          vectors);
      check_launch("rms_norm_dweight_kernel");
    });
  });
}

}  // namespace tandem::gpu
