// gpu_moe_bench [--backward] [MODEL ...]: Mixture-of-Experts layers with all experts on one GPU,
// bf16, at the sizes of known models: the two grouped products alone, what stands between them, and
// the whole layer from the router's logits on, as a CUDA graph. Candidates in random order with
// idle gaps, L2 flushed; medians. Checked in the same run: sampled rows against sums in f64 on the
// host, and the bits of two runs. One JSON object a line. --backward: gpu_moe_backward.cc.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <string>
#include <string_view>
#include <vector>

#include "bench/gpu_moe_case.h"
#include "core/cuda/graph.h"
#include "core/version.h"
#include "gemm/cuda/gemm_lt.h"
#include "overlap/cuda/local_moe.h"
#include "tandem/error.h"

namespace tandem {
namespace {

using namespace gpu;
using namespace moe_bench;

constexpr int kSampledRows = 2, kSampledColumns = 16;

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
  const ReadingFlush flush(stream);
  uint64_t number = 1;
  for (const Tensor& tensor : {o.x_view(), o.router_view(), o.in_view(), o.out_view()}) {
    fill_uniform(tensor, kSeed, number++, 0, stream);
  }
  const LtContext lt;
  const LtGemm logits_gemm(lt, {tokens, m.experts, m.hidden, DType::bf16, DType::f32});
  const RouterOptions options{m.top_k, false, true};
  const MoeShape shape = shape_of(m, tokens);
  LocalMoe layer(shape);
  const LocalMoeForm form = form_of(shape);
  LocalMoe other(shape, {.sorts_first = !form.sorts_first});
  const auto route = [&] {
    logits_gemm.run(o.x.data(), o.w_router.data(), o.logits.data(), nullptr, stream);
    launch_route(o.logits.view(DType::f32, {tokens, m.experts}), nullptr, options,
                 o.routing().experts, o.routing().weights, stream);
  };
  const auto all = [&] {
    route();
    layer.forward(o.x_view(), o.routing(), o.in_view(), o.out_view(), o.result(), stream);
  };
  const auto all_of_other = [&] {
    route();
    other.forward(o.x_view(), o.routing(), o.in_view(), o.out_view(), o.result(), stream);
  };
  all_of_other();
  all();
  const size_t results = size_t(tokens * m.hidden);
  const auto once = read<uint16_t>(o.out.data(), results, stream);
  const Graph graph(stream, all), graph_of_other(stream, all_of_other);
  LocalMoe& sorts = form.sorts_first ? layer : other;
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
      {"layer", [&] { graph.launch(stream); }, {}},
      {"gather", [&] { sorts.gather(o.x_view(), stream); }, {}},
      {"other_in", [&] { other.multiply_in(o.x_view(), o.in_view(), stream); }, {}},
      {"other_layer", [&] { graph_of_other.launch(stream); }, {}}};
  measure(candidates, kRepeats, flush, stream);
  graph.launch(stream);
  const bool same = read<uint16_t>(o.out.data(), results, stream) == once;
  const double error = worst_error(o, stream);
  std::string times;
  for (const Candidate& c : candidates) {
    times += fmt::format("{}\"{}\":{:.1f}", times.empty() ? "" : ",", c.name, median(c.us));
  }
  auto chosen = read<int32_t>(o.experts.data(), size_t(tokens * m.top_k), stream);
  std::ranges::sort(chosen);
  const auto touched = std::ranges::unique(chosen).begin() - chosen.begin();
  const auto time = [&](size_t i) { return median(candidates[i].us); };
  const double flops = 2.0 * double(tokens * m.top_k) * double(m.hidden) * double(m.ffn);
  fmt::print(
      "{{\"model\":\"{}\",\"tokens\":{},\"commit\":\"{}\",\"sorts_first\":{},"
      "\"touched_experts\":{},\"touched_bytes\":{},\"time_us\":{{{}}},\"tflops\":{{\"in\":"
      "{:.0f},\"out\":{:.0f},\"layer\":{:.0f}}},\"layer_of_products\":{:.3f},\"worst_error\":{:.2e}"
      ","
      "\"same_bits\":{}}}\n",
      m.name, tokens, kCommit, form.sorts_first, touched, touched * 6 * m.hidden * m.ffn, times,
      2 * flops / time(0) / 1e6, flops / time(1) / 1e6, 3 * flops / time(6) / 1e6,
      time(6) / time(2), error, same);
  std::fflush(stdout);
  if (!same || !(error < 0.02)) throw Error("gpu_moe_bench: wrong results");
}

}  // namespace
}  // namespace tandem

int main(int argc, char** argv) {
  using namespace tandem;
  try {
    std::vector<std::string> names(argv + 1, argv + argc);
    const bool backward = std::erase(names, "--backward") > 0;
    for (const Model& model : kModels) {
      const bool wanted =
          names.empty() || std::ranges::count(names, std::string_view(model.name)) > 0;
      if (!wanted) continue;
      if (!backward) {
        for (const int64_t tokens : {16, 64, 256, 1024, 4096, 8192}) bench(model, tokens);
      } else if (model.experts < 256) {  // whose gradients fit into 80 GB beside their weights
        for (const int64_t tokens : {1024, 4096, 8192}) bench_backward(model, tokens);
      }
    }
  } catch (const std::exception& error) {
    fmt::print(stderr, "{}\n", error.what());
    return 1;
  }
}
