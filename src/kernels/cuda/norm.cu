#include "core/cuda/load_module.cuh"
#include "core/cuda/share.h"
#include "kernels/cuda/column_sums.cuh"
#include "kernels/cuda/kernels.h"
#include "kernels/cuda/rows.cuh"

namespace tandem::gpu {
namespace {

template <typename T, int kWidth>
__device__ float sum_squares(const Vector<T, kWidth>& values) {
  float squares = 0;
#pragma unroll
  for (int e = 0; e < kWidth; ++e) {
    const float value = to_float(values.at[e]);
    squares = fmaf(value, value, squares);
  }
  return squares;
}

template <typename T, typename In, int kWidth>
__device__ Vector<T, kWidth> normalized(const Vector<In, kWidth>& values, float scale,
                                        const Vector<In, kWidth>& gain) {
  Vector<T, kWidth> result;
#pragma unroll
  for (int e = 0; e < kWidth; ++e) {
    result.at[e] = from_float<T>(to_float(values.at[e]) * scale * to_float(gain.at[e]));
  }
  return result;
}

template <typename In, typename T, int kWidth>
__global__ void __launch_bounds__(kMaxRowThreads)
    rms_norm_kernel(Rows<In, kWidth> x, Rows<In, kWidth> weight, Rows<T, kWidth> out,
                    float* inverse_rms, int64_t vectors, float eps) {
  let_next_start();
  wait_for_previous();
  const int64_t row = blockIdx.x;
  Vector<In, kWidth> cached[kCachedVectors];
  for_each_cached(vectors, [&](int k, int64_t i) { cached[k] = x.load(row, i); });
  float squares = 0;
  for_each_cached(vectors, [&](int k, int64_t) { squares += sum_squares(cached[k]); });
  for_each_further(vectors, [&](int64_t i) { squares += sum_squares(x.load(row, i)); });
  const float mean = __fdiv_rn(combine_block(squares, Plus{}), float(vectors * kWidth));
  const float scale = __frsqrt_rn(mean + eps);
  if (inverse_rms && threadIdx.x == 0) inverse_rms[row] = scale;
  const auto write = [&](int64_t i, const Vector<In, kWidth>& values) {
    out.store(row, i, normalized<T>(values, scale, weight.load(0, i)));
  };
  for_each_cached(vectors, [&](int k, int64_t i) { write(i, cached[k]); });
  for_each_further(vectors, [&](int64_t i) { write(i, x.load(row, i)); });
}

// y = x + branch and its norm, with the bits of map_kernel and rms_norm_kernel.
template <typename T, int kWidth>
__global__ void __launch_bounds__(kMaxRowThreads)
    add_rms_norm_kernel(Rows<float, kWidth> x, Rows<T, kWidth> branch, Rows<float, kWidth> weight,
                        Rows<float, kWidth> y, Rows<T, kWidth> out, float* inverse_rms,
                        int64_t vectors, float eps) {
  let_next_start();
  wait_for_previous();
  using Vec = Vector<float, kWidth>;
  const int64_t row = blockIdx.x;
  const auto plus = [](Vec values, const Vector<T, kWidth>& added) {
#pragma unroll
    for (int e = 0; e < kWidth; ++e) values.at[e] += to_float(added.at[e]);
    return values;
  };
  Vec cached[kCachedVectors];
  Vector<T, kWidth> cached_branch[kCachedVectors];
  for_each_cached(vectors, [&](int k, int64_t i) {
    cached[k] = x.load(row, i);
    cached_branch[k] = branch.load(row, i);
  });
  float squares = 0;
  for_each_cached(vectors, [&](int k, int64_t i) {
    cached[k] = plus(cached[k], cached_branch[k]);
    y.store(row, i, cached[k]);
    squares += sum_squares(cached[k]);
  });
  for_each_further(vectors, [&](int64_t i) {
    const Vec sum = plus(x.load(row, i), branch.load(row, i));
    y.store(row, i, sum);
    squares += sum_squares(sum);
  });
  const float mean = __fdiv_rn(combine_block(squares, Plus{}), float(vectors * kWidth));
  const float scale = __frsqrt_rn(mean + eps);
  if (threadIdx.x == 0) inverse_rms[row] = scale;
  const auto write = [&](int64_t i, const Vec& values) {
    out.store(row, i, normalized<T>(values, scale, weight.load(0, i)));
  };
  for_each_cached(vectors, [&](int k, int64_t i) { write(i, cached[k]); });
  for_each_further(vectors, [&](int64_t i) { write(i, y.load(row, i)); });
}

template <typename In, typename T, int kWidth>
void launch_rms_norm(const Tensor& x, const Tensor& weight, double eps, const Tensor& out,
                     float* inverse_rms, cudaStream_t stream) {
  const int64_t vectors = x.dim(1) / kWidth;
  launch_early("rms_norm_kernel", rms_norm_kernel<In, T, kWidth>, unsigned(x.dim(0)),
               row_threads(vectors), 0, stream, true, Rows<In, kWidth>(x), Rows<In, kWidth>(weight),
               Rows<T, kWidth>(out), inverse_rms, vectors, float(eps));
}

template <typename D, int kWidth>
__device__ Vector<__nv_bfloat16, kWidth> to_bf16(const Vector<D, kWidth>& values) {
  Vector<__nv_bfloat16, kWidth> rounded;
#pragma unroll
  for (int e = 0; e < kWidth; ++e) {
    rounded.at[e] = from_float<__nv_bfloat16>(to_float(values.at[e]));
  }
  return rounded;
}

// Blocks take rows in turn. A block sums its rows' gradients of the weight in shared memory, each
// element by one thread, and stores the sums as its row of `partial_sums`.
template <typename T, typename D, int kWidth, int kThreads>
__global__ void __launch_bounds__(kThreads, 768 / kThreads)
    rms_norm_backward_kernel(Rows<float, kWidth> x, Rows<float, kWidth> weight,
                             const float* inverse_rms, Rows<T, kWidth> dout, Rows<D, kWidth> dx,
                             Rows<__nv_bfloat16, kWidth> dx_bf16, Rows<float, kWidth> partial_sums,
                             int rows, int vectors) {
  using Vec = Vector<float, kWidth>;
  using Packed = PackedVector<T, kWidth>;
  extern __shared__ float4 shared_memory[];
  auto* const sums = reinterpret_cast<Vec*>(shared_memory);
  __shared__ WarpValues warp_values[2];
  const int thread = int(threadIdx.x);
  const auto for_each_cached_vector = [&](const auto& body) {
#pragma unroll
    for (int k = 0; k < kCachedVectors; ++k) {
      if (thread + k * kThreads < vectors) body(k, thread + k * kThreads);
    }
  };
  const auto for_each_uncached = [&](const auto& body) {
#pragma unroll 1
    for (int i = thread + kCachedVectors * kThreads; i < vectors; i += kThreads) body(i);
  };
  for (int i = thread; i < vectors; i += kThreads) sums[i] = Vec{};

  bool odd = false;
  for (int row = int(blockIdx.x); row < rows; row += int(gridDim.x), odd = !odd) {
    const float scale = inverse_rms[row];
    // Adds to the weight's gradient; returns the product of x and dout times weight.
    const auto add_products = [&](int i, const Vec& values, const Packed& packed) {
      const Vector<T, kWidth> d = packed.unpack();
      const Vec w = weight.load(0, i);
      Vec sum = sums[i];
      float dot = 0;
#pragma unroll
      for (int e = 0; e < kWidth; ++e) {
        sum.at[e] += to_float(d.at[e]) * values.at[e] * scale;
        dot = fmaf(to_float(d.at[e]) * w.at[e], values.at[e], dot);
      }
      sums[i] = sum;
      return dot;
    };
    Vec cached_x[kCachedVectors];
    Packed cached_d[kCachedVectors];
    PackedVector<D, kWidth> cached_dx[kCachedVectors];
    for_each_cached_vector([&](int k, int i) {
      cached_x[k] = x.load(row, i);
      cached_d[k] = dout.load_packed(row, i);
      cached_dx[k] = dx.load_packed(row, i);
    });
    float dot = 0;
    for_each_cached_vector([&](int k, int i) { dot += add_products(i, cached_x[k], cached_d[k]); });
    for_each_uncached(
        [&](int i) { dot += add_products(i, x.load(row, i), dout.load_packed(row, i)); });
    const float total = combine_block(dot, Plus{}, warp_values[odd]);
    const float along = __fdiv_rn(total * scale * scale, float(vectors * kWidth));
    const auto store_dx = [&](int i, const Vec& values, const Packed& packed,
                              const PackedVector<D, kWidth>& packed_dx) {
      const Vector<T, kWidth> d = packed.unpack();
      const Vector<D, kWidth> before = packed_dx.unpack();
      const Vec w = weight.load(0, i);
      Vector<D, kWidth> result;
#pragma unroll
      for (int e = 0; e < kWidth; ++e) {
        const float through = to_float(d.at[e]) * w.at[e] - values.at[e] * along;
        result.at[e] = from_float<D>(to_float(before.at[e]) + scale * through);
      }
      dx.store(row, i, result);
      if (!dx_bf16.data) return;
      dx_bf16.store(row, i, to_bf16(result));
    };
    for_each_cached_vector(
        [&](int k, int i) { store_dx(i, cached_x[k], cached_d[k], cached_dx[k]); });
    for_each_uncached([&](int i) {
      store_dx(i, x.load(row, i), dout.load_packed(row, i), dx.load_packed(row, i));
    });
  }
  for (int i = thread; i < vectors; i += kThreads) partial_sums.store(blockIdx.x, i, sums[i]);
}

// Calls body(std::integral_constant<int, threads>) with the threads of a block whose registers hold
// the row, at most 512.
template <typename Body>
void with_backward_threads(int64_t vectors, const Body& body) {
  if (vectors <= 64 * kCachedVectors) return body(std::integral_constant<int, 64>{});
  if (vectors <= 256 * kCachedVectors) return body(std::integral_constant<int, 256>{});
  body(std::integral_constant<int, 512>{});
}

// Throws Unsupported if a block of the GPU has less shared memory than rows of `columns` floats.
template <typename Kernel>
void allow_row_in_shared_memory(const char* name, Kernel* kernel, int64_t columns) {
  constexpr int64_t kAlwaysAllowed = 8192;
  if (columns <= kAlwaysAllowed) return;
  int bytes = 0;
  check(cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin,
                               this_share()->device()),
        name);
  const int64_t largest = (bytes - int64_t(2 * sizeof(WarpValues))) / int64_t(sizeof(float));
  if (columns > largest) {
    throw Unsupported(std::string(name) + ": rows of " + std::to_string(columns) +
                      " elements: expected at most " + std::to_string(largest));
  }
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             int(columns) * int(sizeof(float))),
        name);
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

void add_rms_norm_forward(cudaStream_t stream, const Tensor& x, const Tensor& branch,
                          const Tensor& weight, double eps, const Tensor& y, const Tensor& out,
                          const Tensor& inverse_rms) {
  require_dtype("add_rms_norm_forward: x", x, DType::f32);
  require_dtype("add_rms_norm_forward: weight", weight, DType::f32);
  require_dtype("add_rms_norm_forward: y", y, DType::f32);
  require_dtype("add_rms_norm_forward: inverse_rms", inverse_rms, DType::f32);
  with_element("add_rms_norm_forward: out", out, [&]<typename T>(T) {
    require_dtype("add_rms_norm_forward: branch", branch, out.dtype());
    if (x.elements() == 0) return;
    with_width<4>({&x, &branch, &weight, &y, &out}, [&](auto width) {
      constexpr int kWidth = width();
      using Floats = Rows<float, kWidth>;
      using Values = Rows<T, kWidth>;
      const int64_t vectors = x.dim(1) / kWidth;
      launch_early("add_rms_norm_kernel", add_rms_norm_kernel<T, kWidth>, unsigned(x.dim(0)),
                   row_threads(vectors), 0, stream, true, Floats(x), Values(branch), Floats(weight),
                   Floats(y), Values(out), inverse_rms.as<float>(), vectors, float(eps));
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

int64_t rms_norm_partial_sums(int64_t rows, int64_t hidden) {
  constexpr int64_t kSms = 132;         // of an H100
  constexpr int64_t kElements = 12288;  // of the rows that an SM's registers hold
  return std::min(rows, kSms * std::max<int64_t>(1, kElements / std::max<int64_t>(1, hidden)));
}

void rms_norm_backward(cudaStream_t stream, const Tensor& x, const Tensor& weight,
                       const Tensor& inverse_rms, const Tensor& dout, const Tensor& dx,
                       const Tensor& dweight, const Tensor& partial_sums, const Tensor& dx_bf16) {
  const Tensor rounded =
      dx_bf16.data() ? dx_bf16 : Tensor(nullptr, DType::bf16, {0, x.dim(1)}, x.device());
  require_dtype("rms_norm_backward: dx_bf16", rounded, DType::bf16);
  require_dtype("rms_norm_backward: x", x, DType::f32);
  require_dtype("rms_norm_backward: weight", weight, DType::f32);
  require_dtype("rms_norm_backward: inverse_rms", inverse_rms, DType::f32);
  require_dtype("rms_norm_backward: dweight", dweight, DType::f32);
  require_dtype("rms_norm_backward: partial_sums", partial_sums, DType::f32);
  const auto launch = [&]<typename T, typename D>(T, D) {
    if (x.elements() == 0) return;
    const int64_t blocks = rms_norm_partial_sums(x.dim(0), x.dim(1));
    require_shape("rms_norm_backward: partial_sums", partial_sums, {blocks, x.dim(1)});
    with_width<4>({&x, &weight, &dout, &dx, &dweight, &partial_sums, &rounded}, [&](auto width) {
      constexpr int kWidth = width();
      using Floats = Rows<float, kWidth>;
      const int64_t vectors = x.dim(1) / kWidth;
      const Floats sums(partial_sums);
      with_backward_threads(vectors, [&](auto threads) {
        const auto kernel = rms_norm_backward_kernel<T, D, kWidth, threads()>;
        allow_row_in_shared_memory("rms_norm_backward", kernel, x.dim(1));
        kernel<<<unsigned(blocks), threads(), size_t(x.dim(1)) * sizeof(float), stream>>>(
            Floats(x), Floats(weight), inverse_rms.as<float>(), Rows<T, kWidth>(dout),
            Rows<D, kWidth>(dx), Rows<__nv_bfloat16, kWidth>(rounded), sums, int(x.dim(0)),
            int(vectors));
        check_launch("rms_norm_backward_kernel");
      });
      launch_column_sums(sums, blocks, Floats(dweight), vectors, true, stream);
    });
  };
  with_element("rms_norm_backward: dout", dout, [&]<typename T>(T t) {
    with_element("rms_norm_backward: dx", dx, [&]<typename D>(D d) { launch(t, d); });
  });
}

}  // namespace tandem::gpu
