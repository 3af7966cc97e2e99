// gpu_moe_bench [MODEL ...]: Mixture-of-Experts layers with all experts on one GPU, bf16, at the
// sizes of known models: the two grouped products alone, what stands between them, and the whole
// layer from the router's logits on, as a CUDA graph. Candidates in random order with idle gaps, L2
// flushed; medians. Checked in the same run: sampled rows against sums in f64 on the host, and the
// bits of two runs. One JSON object a line.
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "core/cuda/fill.h"
#include "core/cuda/graph.h"
#include "core/cuda/handles.h"
#include "core/version.h"
#include "gemm/cuda/gemm_lt.h"
#include "overlap/cuda/local_moe.h"
#include "tandem/error.h"
#include "tandem/random.h"

namespace tandem {
namespace {

using namespace gpu;

constexpr int kRepeats = 15;
constexpr int kSampledRows = 4, kSampledColumns = 16;
constexpr uint64_t kSeed = 3;

struct Model {
  const char* name;
  int experts, top_k;
  int64_t hidden, ffn;
};
constexpr Model kModels[] = {{"mixtral-8x7b", 8, 2, 4096, 14336},
                             {"qwen2-moe-2.7b", 64, 4, 2048, 1408},
                             {"phi3.5-moe", 16, 2, 4096, 6400},
                             {"qwen3-30b", 128, 8, 2048, 768},
                             {"deepseek-v3", 256, 8, 7168, 2048}};

struct Candidate {
  std::string name;
  std::function<void()> run;
  std::vector<double> us;
};

void measure(std::vector<Candidate>& candidates, const DeviceMemory& flush, cudaStream_t stream) {
  const Event begin(Event::Kind::timing), end(Event::Kind::timing);
  double idle_us = 1000;
  for (int round = -1; round < kRepeats; ++round) {
    std::vector<size_t> order(candidates.size());
    for (size_t i = 0; i < order.size(); ++i) order[i] = i;
    for (size_t i = order.size(); i > 1; --i) {
      std::swap(order[i - 1], order[philox(kSeed, uint64_t(round + 1), i)[0] % i]);
    }
    for (const size_t which : order) {
      std::this_thread::sleep_for(std::chrono::microseconds(int64_t(idle_us)));
      check(cudaMemsetAsync(flush.data(), round & 0xff, flush.bytes(), stream), "flush L2");
      check(cudaEventRecord(begin.get(), stream), "begin");
      candidates[which].run();
      check(cudaEventRecord(end.get(), stream), "end");
      check(cudaStreamSynchronize(stream), "a run");
      const double us = microseconds(begin, end);
      idle_us = 2.5 * us;
      if (round >= 0) candidates[which].us.push_back(us);
    }
  }
}

double median(std::vector<double> values) {
  std::ranges::nth_element(values, values.begin() + std::ptrdiff_t(values.size() / 2));
  return values[values.size() / 2];
}

/// Operands of a layer on the GPU. Everything is drawn uniformly from [-1, 1).
struct Operands {
  Operands(const Model& m, int64_t tokens)
      : model(m),
        rows(tokens),
        x(bytes(tokens * m.hidden)),
        w_router(bytes(m.experts * m.hidden)),
        w_in(bytes(m.experts * 2 * m.ffn * m.hidden)),
        w_out(bytes(m.experts * m.hidden * m.ffn)),
        logits(size_t(tokens * m.experts) * 4),
        experts(size_t(tokens * m.top_k) * 4),
        weights(size_t(tokens * m.top_k) * 4),
        out(bytes(tokens * m.hidden)) {}
  static size_t bytes(int64_t count) { return size_t(count) * 2; }
  Tensor x_view() const { return x.view(DType::bf16, {rows, model.hidden}); }
  Tensor in_view() const {
    return w_in.view(DType::bf16, {model.experts * 2 * model.ffn, model.hidden});
  }
  Tensor out_view() const {
    return w_out.view(DType::bf16, {model.experts * model.hidden, model.ffn});
  }
  Tensor router_view() const { return w_router.view(DType::bf16, {model.experts, model.hidden}); }
  Tensor result() const { return out.view(DType::bf16, {rows, model.hidden}); }
  MoeRouting routing() const {
    return {experts.view(DType::i32, {rows, model.top_k}),
            weights.view(DType::f32, {rows, model.top_k})};
  }

  Model model;
  int64_t rows;
  DeviceMemory x, w_router, w_in, w_out, logits, experts, weights, out;
};

template <typename T>
std::vector<T> read(const void* device, size_t count, cudaStream_t stream) {
  std::vector<T> host(count);
  check(cudaStreamSynchronize(stream), "read");
  check(cudaMemcpyAsync(host.data(), device, count * sizeof(T), cudaMemcpyDeviceToHost, stream),
        "read");
  check(cudaStreamSynchronize(stream), "read");
  return host;
}

std::vector<double> row_of(const Tensor& matrix, int64_t row, cudaStream_t stream) {
  const int64_t columns = matrix.dim(1);
  const auto bits = read<BFloat16>(matrix.as<BFloat16>() + row * columns, size_t(columns), stream);
  std::vector<double> values;
  for (const BFloat16 value : bits) values.push_back(double(value.to_float()));
  return values;
}

double dot(const std::vector<double>& a, const std::vector<double>& b) {
  double sum = 0;
  for (size_t i = 0; i < a.size(); ++i) sum += a[i] * b[i];
  return sum;
}

/// Largest error of sampled results over the largest of them: what the chosen experts make of
/// sampled rows, with the inner activations rounded to bf16, as the layer does.
double worst_error(const Operands& o, cudaStream_t stream) {
  const Model& m = o.model;
  const auto experts = read<int32_t>(o.experts.data(), size_t(o.rows * m.top_k), stream);
  const auto weights = read<float>(o.weights.data(), experts.size(), stream);
  double worst = 0, largest = 0;
  for (int sample = 0; sample < kSampledRows; ++sample) {
    const int64_t row = o.rows * (2 * sample + 1) / (2 * kSampledRows);
    const auto x = row_of(o.x_view(), row, stream), found = row_of(o.result(), row, stream);
    std::vector<double> expected(kSampledColumns, 0);
    for (int k = 0; k < m.top_k; ++k) {
      const size_t choice = size_t(row * m.top_k + k);
      const int64_t first = experts[choice] * 2 * m.ffn;
      std::vector<double> inner;
      const auto rows = read<BFloat16>(o.in_view().as<BFloat16>() + first * m.hidden,
                                       size_t(2 * m.ffn * m.hidden), stream);
      for (int64_t f = 0; f < m.ffn; ++f) {
        double gate = 0, up = 0;
        for (int64_t i = 0; i < m.hidden; ++i) {
          gate += x[size_t(i)] * double(rows[size_t(f * m.hidden + i)].to_float());
          up += x[size_t(i)] * double(rows[size_t((m.ffn + f) * m.hidden + i)].to_float());
        }
        const double value = gate / (1 + std::exp(-gate)) * up;
        inner.push_back(double(BFloat16::from_float(float(value)).to_float()));
      }
      for (int c = 0; c < kSampledColumns; ++c) {
        const int64_t column = m.hidden * c / kSampledColumns;
        const auto w = row_of(o.out_view(), experts[choice] * m.hidden + column, stream);
        expected[size_t(c)] += double(weights[choice]) * dot(inner, w);
      }
    }
    for (int c = 0; c < kSampledColumns; ++c) {
      const double value = found[size_t(m.hidden * c / kSampledColumns)];
      const double error = std::abs(value - expected[size_t(c)]);
      worst = std::isfinite(value) ? std::max(worst, error) : HUGE_VAL;
      largest = std::max(largest, std::abs(expected[size_t(c)]));
    }
  }
  return worst / largest;
}

void bench(const Model& m, int64_t tokens) {
  const Stream own;
  const cudaStream_t stream = own.get();
  const Operands o(m, tokens);
  const DeviceMemory flush(size_t(256) << 20);
  uint64_t number = 1;
  for (const Tensor& tensor : {o.x_view(), o.router_view(), o.in_view(), o.out_view()}) {
    fill_uniform(tensor, kSeed, number++, 0, stream);
  }
  const LtContext lt;
  const LtGemm logits_gemm(lt, {tokens, m.experts, m.hidden, DType::bf16, DType::f32});
  const RouterOptions options{m.top_k, false, true};
  LocalMoe layer({.tokens = tokens,
                  .hidden = m.hidden,
                  .ffn = m.ffn,
                  .experts = m.experts,
                  .top_k = m.top_k,
                  .dtype = DType::bf16});
  const auto route = [&] {
    logits_gemm.run(o.x.data(), o.w_router.data(), o.logits.data(), nullptr, stream);
    launch_route(o.logits.view(DType::f32, {tokens, m.experts}), nullptr, options,
                 o.routing().experts, o.routing().weights, stream);
  };
  const auto all = [&] {
    route();
    layer.forward(o.x_view(), o.routing(), o.in_view(), o.out_view(), o.result(), stream);
  };
  all();
  const size_t results = size_t(tokens * m.hidden);
  const auto once = read<uint16_t>(o.out.data(), results, stream);
  const Graph graph(stream, all);
  std::vector<Candidate> candidates{
      {"in", [&] { layer.multiply_in(o.x_view(), o.in_view(), stream); }, {}},
      {"out", [&] { layer.multiply_out(o.out_view(), stream); }, {}},
      {"products",
       [&] {
         layer.multiply_in(o.x_view(), o.in_view(), stream);
         layer.multiply_out(o.out_view(), stream);
       },
       {}},
      {"route", route, {}},
      {"place", [&] { layer.place(o.routing(), stream); }, {}},
      {"sum", [&] { layer.sum(o.routing(), o.result(), stream); }, {}},
      {"layer", [&] { graph.launch(stream); }, {}}};
  measure(candidates, flush, stream);
  const bool same = read<uint16_t>(o.out.data(), results, stream) == once;
  const double error = worst_error(o, stream);
  std::string times;
  for (const Candidate& c : candidates) {
    times += fmt::format("{}\"{}\":{:.1f}", times.empty() ? "" : ",", c.name, median(c.us));
  }
  const auto time = [&](size_t i) { return median(candidates[i].us); };
  const double flops = 2.0 * double(tokens * m.top_k) * double(m.hidden) * double(m.ffn);
  fmt::print(
      "{{\"model\":\"{}\",\"tokens\":{},\"commit\":\"{}\",\"time_us\":{{{}}},\"tflops\":{{\"in\":"
      "{:.0f},\"out\":{:.0f},\"layer\":{:.0f}}},\"layer_of_products\":{:.3f},\"worst_error\":{:.2e}"
      ","
      "\"same_bits\":{}}}\n",
      m.name, tokens, kCommit, times, 2 * flops / time(0) / 1e6, flops / time(1) / 1e6,
      3 * flops / time(6) / 1e6, time(6) / time(2), error, same);
  std::fflush(stdout);
  if (!same || !(error < 0.02)) throw Error("gpu_moe_bench: wrong results");
}

}  // namespace
}  // namespace tandem

int main(int argc, char** argv) {
  using namespace tandem;
  try {
    for (const Model& model : kModels) {
      const bool wanted = argc == 1 || std::any_of(argv + 1, argv + argc, [&](const char* name) {
                            return std::string(name) == model.name;
                          });
      if (!wanted) continue;
      for (const int64_t tokens : {16, 64, 256, 1024, 4096, 8192}) bench(model, tokens);
    }
  } catch (const std::exception& error) {
    fmt::print(stderr, "{}\n", error.what());
    return 1;
  }
}
