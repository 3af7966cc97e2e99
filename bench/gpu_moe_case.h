// Shared by the benchmarks of MoE layers on one GPU: models, operands, and the L2 flush.
#pragma once

#include <algorithm>
#include <vector>

#include "bench/gpu_candidates.h"
#include "codec/cuda/quantize.h"
#include "core/cuda/fill.h"
#include "core/cuda/handles.h"
#include "overlap/moe/cuda/one_gpu.h"
#include "overlap/moe/cuda/permute.h"
#include "tandem/moe.h"

namespace tandem::moe_bench {

using namespace gpu;

constexpr int kRepeats = 15;
constexpr uint64_t kSeed = 3;

struct Model {
  const char* name;
  int experts, top_k;
  int64_t hidden, ffn;
  /// Rows of the router's weight: cuBLASLt needs multiples of 8. No token is routed to rows past
  /// the experts.
  int64_t router_rows() const { return (experts + 7) / 8 * 8; }
};
inline constexpr Model kModels[] = {{"mixtral-8x7b", 8, 2, 4096, 14336},
                                    {"qwen2-moe-2.7b", 64, 4, 2048, 1408},
                                    {"phi3.5-moe", 16, 2, 4096, 6400},
                                    {"qwen3-30b", 128, 8, 2048, 768},
                                    {"deepseek-v3", 256, 8, 7168, 2048}};

inline MoeShape shape_of(const Model& m, int64_t tokens) {
  return {.tokens = tokens,
          .hidden = m.hidden,
          .ffn = m.ffn,
          .experts = m.experts,
          .top_k = m.top_k,
          .dtype = DType::bf16};
}

/// Flushes L2 by reading, so that few lines have to be written back during the measurement.
class ReadingFlush {
 public:
  explicit ReadingFlush(cudaStream_t stream)
      : read_(size_t(kRows * kTerms * kColumns) * 2),
        positions_(size_t(kRows * kTerms) * 4),
        sums_(size_t(kRows * kColumns) * 2),
        stream_(stream) {
    std::vector<int32_t> positions(static_cast<size_t>(kRows * kTerms));
    for (size_t i = 0; i < positions.size(); ++i) positions[i] = int32_t(i);
    check(cudaMemcpyAsync(positions_.data(), positions.data(), positions_.bytes(),
                          cudaMemcpyHostToDevice, stream),
          "flush L2");
    check(cudaStreamSynchronize(stream), "flush L2");
  }
  void operator()() const {
    launch_weighted_sum(read_.view(DType::bf16, {kRows * kTerms, kColumns}),
                        reinterpret_cast<const int32_t*>(positions_.data()), nullptr, kTerms,
                        sums_.view(DType::bf16, {kRows, kColumns}), stream_);
  }

 private:
  static constexpr int kTerms = 64;
  static constexpr int64_t kRows = 1024, kColumns = 2048;  // 256 MiB
  DeviceMemory read_, positions_, sums_;
  cudaStream_t stream_;
};

/// Operands of a layer on the GPU. All are uniform in [-1, 1).
struct Operands {
  Operands(const Model& m, int64_t tokens)
      : model(m),
        rows(tokens),
        x(bytes(tokens * m.hidden)),
        w_router(bytes(m.router_rows() * m.hidden)),
        bias(size_t(m.router_rows()) * 4),
        w_in(bytes(m.experts * 2 * m.ffn * m.hidden)),
        w_out(bytes(m.experts * m.hidden * m.ffn)),
        logits(size_t(tokens * m.router_rows()) * 4),
        experts(size_t(tokens * m.top_k) * 4),
        weights(size_t(tokens * m.top_k) * 4),
        out(bytes(tokens * m.hidden)) {
    std::vector<float> values(size_t(m.router_rows()), 0.0f);
    std::fill(values.begin() + m.experts, values.end(), -1e30f);
    const Stream stream;
    check(cudaMemcpyAsync(bias.data(), values.data(), bias.bytes(), cudaMemcpyHostToDevice,
                          stream.get()),
          "a router's bias");
    check(cudaStreamSynchronize(stream.get()), "a router's bias");
  }
  Tensor router_bias() const {
    if (model.router_rows() == model.experts) return {};
    return bias.view(DType::f32, {model.router_rows()});
  }
  static size_t bytes(int64_t count) { return size_t(count) * 2; }
  Tensor x_view() const { return x.view(DType::bf16, {rows, model.hidden}); }
  Tensor in_view() const {
    return w_in.view(DType::bf16, {model.experts * 2 * model.ffn, model.hidden});
  }
  Tensor out_view() const {
    return w_out.view(DType::bf16, {model.experts * model.hidden, model.ffn});
  }
  Tensor router_view() const {
    return w_router.view(DType::bf16, {model.router_rows(), model.hidden});
  }
  Tensor result() const { return out.view(DType::bf16, {rows, model.hidden}); }
  MoeRouting routing() const {
    return {experts.view(DType::i32, {rows, model.top_k}),
            weights.view(DType::f32, {rows, model.top_k})};
  }

  Model model;
  int64_t rows;
  DeviceMemory x, w_router, bias, w_in, w_out, logits, experts, weights, out;
};

/// Weights of `o`, rounded to e4m3 by row.
struct CodedWeights {
  CodedWeights(const Operands& o, cudaStream_t stream)
      : in(size_t(o.in_view().elements())),
        out(size_t(o.out_view().elements())),
        in_scales(size_t(o.in_view().dim(0)) * 4),
        out_scales(size_t(o.out_view().dim(0)) * 4) {
    const auto quantize = [&](const Tensor& weight, const DeviceMemory& codes,
                              const DeviceMemory& scales) {
      launch_quantize_rows(weight, codes.view(DType::e4m3, {weight.dim(0), weight.dim(1)}),
                           scales.view(DType::f32, {weight.dim(0)}), stream);
    };
    quantize(o.in_view(), in, in_scales);
    quantize(o.out_view(), out, out_scales);
  }
  DeviceMemory in, out, in_scales, out_scales;
};

/// Weights of a layer.
struct MoeWeights {
  Tensor in, out;
  MoeScales scales = {};  ///< for e4m3 weights
  bool e4m3() const { return in.dtype() == DType::e4m3; }
};
inline MoeWeights weights_of(const Operands& o, const CodedWeights* coded) {
  const Tensor in = o.in_view(), out = o.out_view();
  if (!coded) return {in, out};
  return {coded->in.view(DType::e4m3, {in.dim(0), in.dim(1)}),
          coded->out.view(DType::e4m3, {out.dim(0), out.dim(1)}),
          {coded->in_scales.view(DType::f32, {in.dim(0)}),
           coded->out_scales.view(DType::f32, {out.dim(0)})}};
}

template <typename T>
std::vector<T> read(const void* device, size_t count, cudaStream_t stream) {
  std::vector<T> host(count);
  check(cudaStreamSynchronize(stream), "read");
  check(cudaMemcpyAsync(host.data(), device, count * sizeof(T), cudaMemcpyDeviceToHost, stream),
        "read");
  check(cudaStreamSynchronize(stream), "read");
  return host;
}

inline std::vector<double> row_of(const Tensor& matrix, int64_t row, cudaStream_t stream) {
  const int64_t columns = matrix.dim(1);
  const auto bits = read<BFloat16>(matrix.as<BFloat16>() + row * columns, size_t(columns), stream);
  std::vector<double> values;
  for (const BFloat16 value : bits) values.push_back(double(value.to_float()));
  return values;
}

inline double dot(const std::vector<double>& a, const std::vector<double>& b) {
  double sum = 0;
  for (size_t i = 0; i < a.size(); ++i) sum += a[i] * b[i];
  return sum;
}

/// Times backward passes of a training layer; throws if a result is wrong.
void bench_backward(const Model& model, int64_t tokens);

}  // namespace tandem::moe_bench
