#include "core/cuda/load_module.cuh"
#include "kernels/cuda/column_sums.cuh"
#include "kernels/cuda/kernels.h"
#include "kernels/cuda/rows.cuh"
#include "kernels/row_ops.h"

namespace tandem::gpu {
namespace {

template <typename T, int kWidth>
struct AddBias {
  Rows<T, kWidth> rows;
  Rows<float, kWidth> bias;

  struct Loaded {
    Vector<T, kWidth> row;
    Vector<float, kWidth> bias;
  };
  __device__ Loaded load(int64_t row, int64_t i) const {
    return {rows.load(row, i), bias.load(0, i)};
  }
  __device__ void store(int64_t row, int64_t i, const Loaded& in) const {
    Vector<T, kWidth> out;
#pragma unroll
    for (int e = 0; e < kWidth; ++e) {
      out.at[e] = from_float<T>(to_float(in.row.at[e]) + in.bias.at[e]);
    }
    rows.store(row, i, out);
  }
};

template <typename T>
__device__ float gate_value(T gate) {
  return 1 / (1 + clamped_exp(-to_float(gate)));
}

template <typename T, int kWidth>
struct GateRows {
  Rows<T, kWidth> rows;
  Rows<T, 1> gate;

  struct Loaded {
    Vector<T, kWidth> row;
    T gate;
  };
  __device__ Loaded load(int64_t row, int64_t i) const {
    return {rows.load(row, i), gate.load(row, 0).at[0]};
  }
  __device__ void store(int64_t row, int64_t i, const Loaded& in) const {
    const float share = gate_value(in.gate);
    Vector<T, kWidth> out;
#pragma unroll
    for (int e = 0; e < kWidth; ++e) out.at[e] = from_float<T>(to_float(in.row.at[e]) * share);
    rows.store(row, i, out);
  }
};

/// One block per row.
template <typename T, int kWidth>
__global__ void __launch_bounds__(kMaxRowThreads)
    gate_rows_backward_kernel(Rows<T, 1> gate, Rows<T, kWidth> gated, Rows<T, kWidth> drows,
                              Rows<T, 1> dgate, int64_t vectors) {
  let_next_start();
  wait_for_previous();
  using Vec = Vector<T, kWidth>;
  const int64_t row = blockIdx.x;
  Vec cached[kCachedVectors], cached_gated[kCachedVectors];
  for_each_cached(vectors, [&](int k, int64_t i) {
    cached[k] = drows.load(row, i);
    cached_gated[k] = gated.load(row, i);
  });
  float dot = 0;
  const auto add_products = [&](const Vec& d, const Vec& out) {
#pragma unroll
    for (int e = 0; e < kWidth; ++e) dot = fmaf(to_float(d.at[e]), to_float(out.at[e]), dot);
  };
  for_each_cached(vectors, [&](int k, int64_t) { add_products(cached[k], cached_gated[k]); });
  for_each_further(vectors,
                   [&](int64_t i) { add_products(drows.load(row, i), gated.load(row, i)); });
  const float total = combine_block(dot, Plus{});
  const float open = gate_value(gate.load(row, 0).at[0]);
  if (threadIdx.x == 0) dgate.store(row, 0, {{from_float<T>((1 - open) * total)}});
  const auto scale = [&](int64_t i, Vec d) {
#pragma unroll
    for (int e = 0; e < kWidth; ++e) d.at[e] = from_float<T>(to_float(d.at[e]) * open);
    drows.store(row, i, d);
  };
  for_each_cached(vectors, [&](int k, int64_t i) { scale(i, cached[k]); });
  for_each_further(vectors, [&](int64_t i) { scale(i, drows.load(row, i)); });
}

constexpr int kHeadThreads = 256;
constexpr int kMaxOfLane = 16;  // elements of a head in a lane's registers

/// A head of a row in the registers of a warp.
template <typename T, int kWidth>
struct Head {
  static constexpr int kVectors = kMaxOfLane / kWidth;
  using Vec = Vector<T, kWidth>;

  /// Calls body(k, i) for each of the lane's vectors, i in the head.
  template <typename Body>
  static __device__ void for_each(int vectors, const Body& body) {
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      const int i = int(threadIdx.x) % 32 + k * 32;
      if (i < vectors) body(k, i);
    }
  }
  static __device__ float warp_sum(float value) {
#pragma unroll
    for (int offset = 16; offset; offset /= 2) value += __shfl_xor_sync(~0u, value, offset);
    return value;
  }
  static __device__ float inverse_rms(const Vec (&values)[kVectors], int vectors, float eps) {
    float squares = 0;
    for_each(vectors, [&](int k, int) {
#pragma unroll
      for (int e = 0; e < kWidth; ++e) {
        const float value = to_float(values[k].at[e]);
        squares = fmaf(value, value, squares);
      }
    });
    return 1 / sqrtf(warp_sum(squares) / float(vectors * kWidth) + eps);
  }
};

/// Heads of all rows in order; `vectors` each.
struct HeadItems {
  int64_t heads, count;
  int vectors;

  __device__ int64_t first() const {
    return int64_t(blockIdx.x) * (kHeadThreads / 32) + threadIdx.x / 32;
  }
  static __device__ int64_t step() { return int64_t(gridDim.x) * (kHeadThreads / 32); }
  __device__ int64_t row(int64_t item) const { return item / heads; }
  /// First vector of a head in its row.
  __device__ int64_t begin(int64_t item) const { return item % heads * vectors; }
};

/// One warp per head. `before` without data: nothing is written there.
template <typename T, int kWidth>
__global__ void __launch_bounds__(kHeadThreads)
    norm_heads_kernel(Rows<T, kWidth> rows, Rows<float, kWidth> weight, Rows<T, kWidth> before,
                      HeadItems items, float eps) {
  using Values = Head<T, kWidth>;
  const int64_t item = items.first();
  if (item >= items.count) return;
  const int64_t row = items.row(item), begin = items.begin(item);
  typename Values::Vec x[Values::kVectors];
  Values::for_each(items.vectors, [&](int k, int i) { x[k] = rows.load(row, begin + i); });
  const float scale = Values::inverse_rms(x, items.vectors, eps);
  Values::for_each(items.vectors, [&](int k, int i) {
    if (before.data) before.store(row, begin + i, x[k]);
    const Vector<float, kWidth> w = weight.load(0, i);
#pragma unroll
    for (int e = 0; e < kWidth; ++e) {
      x[k].at[e] = from_float<T>(to_float(x[k].at[e]) * scale * w.at[e]);
    }
    rows.store(row, begin + i, x[k]);
  });
}

/// Warps take heads in turn. Each sums its heads' gradients of the weight in registers, then a
/// block those of its warps, in order, into its row of `partial_sums`.
template <typename T, int kWidth>
__global__ void __launch_bounds__(kHeadThreads)
    norm_heads_backward_kernel(Rows<T, kWidth> before, Rows<float, kWidth> weight,
                               Rows<T, kWidth> drows, Rows<float, kWidth> partial_sums,
                               HeadItems items, float eps) {
  using Values = Head<T, kWidth>;
  using Floats = Vector<float, kWidth>;
  typename Values::Vec x[Values::kVectors], d[Values::kVectors];
  Floats dweight[Values::kVectors] = {};
  for (int64_t item = items.first(); item < items.count; item += HeadItems::step()) {
    const int64_t row = items.row(item), begin = items.begin(item);
    Values::for_each(items.vectors, [&](int k, int i) {
      x[k] = before.load(row, begin + i);
      d[k] = drows.load(row, begin + i);
    });
    const float scale = Values::inverse_rms(x, items.vectors, eps);
    float dot = 0;
    Values::for_each(items.vectors, [&](int k, int i) {
      const Floats w = weight.load(0, i);
#pragma unroll
      for (int e = 0; e < kWidth; ++e) {
        dot = fmaf(to_float(d[k].at[e]) * w.at[e], to_float(x[k].at[e]), dot);
      }
    });
    const float along = Values::warp_sum(dot) * scale * scale / float(items.vectors * kWidth);
    Values::for_each(items.vectors, [&](int k, int i) {
      const Floats w = weight.load(0, i);
#pragma unroll
      for (int e = 0; e < kWidth; ++e) {
        const float dout = to_float(d[k].at[e]), in = to_float(x[k].at[e]);
        dweight[k].at[e] += dout * in * scale;
        d[k].at[e] = from_float<T>(scale * (dout * w.at[e] - in * along));
      }
      drows.store(row, begin + i, d[k]);
    });
  }
  __shared__ Floats sums[32 * Values::kVectors];
  for (int warp = 0; warp < kHeadThreads / 32; ++warp) {
    if (int(threadIdx.x) / 32 == warp) {
      Values::for_each(items.vectors, [&](int k, int i) {
        if (warp == 0) sums[i] = Floats{};
#pragma unroll
        for (int e = 0; e < kWidth; ++e) sums[i].at[e] += dweight[k].at[e];
      });
    }
    __syncthreads();
  }
  for (int i = int(threadIdx.x); i < items.vectors; i += kHeadThreads) {
    partial_sums.store(blockIdx.x, i, sums[i]);
  }
}

unsigned head_blocks(const HeadItems& items) {
  return unsigned((items.count - 1) / (kHeadThreads / 32) + 1);
}

/// Throws Unsupported for heads that a warp's registers do not hold.
void check_head_dim(const char* name, int64_t head_dim) {
  if (head_dim <= 32 * kMaxOfLane) return;
  throw Unsupported(std::string(name) + ": head_dim " + std::to_string(head_dim) +
                    ": expected at most " + std::to_string(32 * kMaxOfLane));
}

}  // namespace

void add_bias(cudaStream_t stream, const Tensor& bias, const Tensor& rows) {
  require_dtype("add_bias: bias", bias, DType::f32);
  require_shape("add_bias: bias", bias, {rows.dim(1)});
  with_element("add_bias: rows", rows, [&]<typename T>(T) {
    with_width<4>({&bias, &rows}, [&](auto width) {
      const AddBias<T, width()> body{Rows<T, width()>(rows), Rows<float, width()>(bias)};
      launch_map("add_bias", body, rows.dim(0), rows.dim(1) / width(), stream);
    });
  });
}

void gate_rows(cudaStream_t stream, const Tensor& gate, const Tensor& rows) {
  require_dtype("gate_rows: gate", gate, rows.dtype());
  require_shape("gate_rows: gate", gate, {rows.dim(0), 1});
  with_element("gate_rows: rows", rows, [&]<typename T>(T) {
    with_width<8>({&rows}, [&](auto width) {
      const GateRows<T, width()> body{Rows<T, width()>(rows), Rows<T, 1>(gate)};
      launch_map("gate_rows", body, rows.dim(0), rows.dim(1) / width(), stream);
    });
  });
}

void column_sums(cudaStream_t stream, const Tensor& rows, const Tensor& sums, bool accumulate) {
  require_dtype("column_sums: sums", sums, DType::f32);
  require_shape("column_sums: sums", sums, {rows.dim(1)});
  with_element("column_sums: rows", rows, [&]<typename T>(T) {
    with_width<16 / int(sizeof(T))>({&rows, &sums}, [&](auto width) {
      launch_column_sums(Rows<T, width()>(rows), rows.dim(0), Rows<float, width()>(sums),
                         rows.dim(1) / width(), accumulate, stream);
    });
  });
}

void gate_rows_backward(cudaStream_t stream, const Tensor& gate, const Tensor& gated,
                        const Tensor& drows, const Tensor& dgate) {
  for (const auto& [name, tensor] : {std::pair("gate_rows_backward: gate", &gate),
                                     std::pair("gate_rows_backward: dgate", &dgate)}) {
    require_dtype(name, *tensor, drows.dtype());
    require_shape(name, *tensor, {drows.dim(0), 1});
  }
  require_dtype("gate_rows_backward: gated", gated, drows.dtype());
  require_shape("gate_rows_backward: gated", gated, {drows.dim(0), drows.dim(1)});
  with_element("gate_rows_backward: drows", drows, [&]<typename T>(T) {
    if (drows.dim(0) == 0) return;
    with_width<16 / int(sizeof(T))>({&gated, &drows}, [&](auto width) {
      const int64_t vectors = drows.dim(1) / width();
      using Values = Rows<T, width()>;
      launch_early("gate_rows_backward", gate_rows_backward_kernel<T, width()>,
                   unsigned(drows.dim(0)), row_threads(vectors), 0, stream, true, Rows<T, 1>(gate),
                   Values(gated), Values(drows), Rows<T, 1>(dgate), vectors);
    });
  });
}

void rms_norm_heads(cudaStream_t stream, const Tensor& weight, double eps, const Tensor& rows,
                    const Tensor& unnormalized) {
  const int64_t head_dim = weight.dim(0), heads = rows.dim(1) / head_dim;
  require_dtype("rms_norm_heads: weight", weight, DType::f32);
  require_shape("rms_norm_heads: rows", rows, {rows.dim(0), heads * head_dim});
  check_head_dim("rms_norm_heads", head_dim);
  const Tensor before = unnormalized.dims() > 0
                            ? unnormalized
                            : Tensor(nullptr, rows.dtype(), {0, rows.dim(1)}, rows.device());
  require_dtype("rms_norm_heads: unnormalized", before, rows.dtype());
  with_element("rms_norm_heads: rows", rows, [&]<typename T>(T) {
    if (rows.elements() == 0) return;
    with_width<4>({&weight, &rows, &before}, [&](auto width) {
      using Values = Rows<T, width()>;
      const HeadItems items{heads, rows.dim(0) * heads, int(head_dim) / width()};
      norm_heads_kernel<<<head_blocks(items), kHeadThreads, 0, stream>>>(
          Values(rows), Rows<float, width()>(weight), Values(before), items, float(eps));
      check_launch("rms_norm_heads");
    });
  });
}

void rms_norm_heads_backward(cudaStream_t stream, const Tensor& unnormalized, const Tensor& weight,
                             double eps, const Tensor& drows, const Tensor& dweight,
                             const Tensor& partial_sums) {
  const int64_t head_dim = weight.dim(0), heads = drows.dim(1) / head_dim;
  require_dtype("rms_norm_heads_backward: unnormalized", unnormalized, drows.dtype());
  require_shape("rms_norm_heads_backward: unnormalized", unnormalized,
                {drows.dim(0), drows.dim(1)});
  require_dtype("rms_norm_heads_backward: weight", weight, DType::f32);
  require_shape("rms_norm_heads_backward: drows", drows, {drows.dim(0), heads * head_dim});
  require_dtype("rms_norm_heads_backward: dweight", dweight, DType::f32);
  require_shape("rms_norm_heads_backward: dweight", dweight, {head_dim});
  require_dtype("rms_norm_heads_backward: partial_sums", partial_sums, DType::f32);
  require_shape("rms_norm_heads_backward: partial_sums", partial_sums,
                {kHeadPartialSums, head_dim});
  check_head_dim("rms_norm_heads_backward", head_dim);
  with_element("rms_norm_heads_backward: drows", drows, [&]<typename T>(T) {
    if (drows.elements() == 0) return;
    with_width<4>({&unnormalized, &weight, &drows, &dweight, &partial_sums}, [&](auto width) {
      using Values = Rows<T, width()>;
      using Floats = Rows<float, width()>;
      const HeadItems items{heads, drows.dim(0) * heads, int(head_dim) / width()};
      const unsigned blocks = std::min(unsigned(kHeadPartialSums), head_blocks(items));
      norm_heads_backward_kernel<<<blocks, kHeadThreads, 0, stream>>>(
          Values(unnormalized), Floats(weight), Values(drows), Floats(partial_sums), items,
          float(eps));
      check_launch("rms_norm_heads_backward");
      launch_column_sums(Floats(partial_sums), blocks, Floats(dweight), items.vectors, true,
                         stream);
    });
  });
}

}  // namespace tandem::gpu
