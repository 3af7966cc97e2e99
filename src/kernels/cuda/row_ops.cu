#include "core/cuda/load_module.cuh"
#include "kernels/cuda/kernels.h"
#include "kernels/cuda/rows.cuh"

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
    const float share = 1 / (1 + clamped_exp(-to_float(in.gate)));
    Vector<T, kWidth> out;
#pragma unroll
    for (int e = 0; e < kWidth; ++e) out.at[e] = from_float<T>(to_float(in.row.at[e]) * share);
    rows.store(row, i, out);
  }
};

constexpr int kHeadThreads = 128;
constexpr int kMaxOfLane = 16;  // elements of a head in a lane's registers

/// One warp per head of a row.
template <typename T>
__global__ void __launch_bounds__(kHeadThreads)
    norm_heads_kernel(Rows<T, 1> rows, const float* weight, float eps, int head_dim, int heads) {
  const int head = int(blockIdx.x) * (kHeadThreads / 32) + int(threadIdx.x) / 32;
  if (head >= heads) return;
  const int lane = int(threadIdx.x) % 32;
  T* const x = rows.data + int64_t(blockIdx.y) * rows.stride + int64_t(head) * head_dim;
  float values[kMaxOfLane], sum = 0;
#pragma unroll
  for (int k = 0; k < kMaxOfLane; ++k) {
    const int i = lane + k * 32;
    values[k] = i < head_dim ? to_float(x[i]) : 0;
    sum = fmaf(values[k], values[k], sum);
  }
#pragma unroll
  for (int offset = 16; offset; offset /= 2) sum += __shfl_xor_sync(~0u, sum, offset);
  const float scale = 1 / sqrtf(sum / float(head_dim) + eps);
#pragma unroll
  for (int k = 0; k < kMaxOfLane; ++k) {
    const int i = lane + k * 32;
    if (i < head_dim) x[i] = from_float<T>(values[k] * scale * weight[i]);
  }
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

void rms_norm_heads(cudaStream_t stream, const Tensor& weight, double eps, const Tensor& rows) {
  const int64_t head_dim = weight.dim(0), heads = rows.dim(1) / head_dim;
  require_dtype("rms_norm_heads: weight", weight, DType::f32);
  require_shape("rms_norm_heads: rows", rows, {rows.dim(0), heads * head_dim});
  if (head_dim > 32 * kMaxOfLane) {
    throw Unsupported("rms_norm_heads: head_dim " + std::to_string(head_dim) +
                      ": expected at most " + std::to_string(32 * kMaxOfLane));
  }
  constexpr int64_t kMaxRows = 65535;  // of a grid
  with_element("rms_norm_heads: rows", rows, [&]<typename T>(T) {
    for (int64_t first = 0; first < rows.dim(0); first += kMaxRows) {
      const Tensor some = rows.rows(first, std::min(kMaxRows, rows.dim(0) - first));
      const dim3 grid(unsigned((heads - 1) / (kHeadThreads / 32) + 1), unsigned(some.dim(0)));
      norm_heads_kernel<<<grid, kHeadThreads, 0, stream>>>(Rows<T, 1>(some), weight.as<float>(),
                                                           float(eps), int(head_dim), int(heads));
      check_launch("rms_norm_heads");
    }
  });
}

}  // namespace tandem::gpu
