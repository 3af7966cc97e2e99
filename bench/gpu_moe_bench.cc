// gpu_moe_bench [--dtype bf16|e4m3] [--backward] [--experts N --top-k N --hidden N --ffn N] [MODEL
// ...]: MoE layers with all experts on one GPU, at the sizes of known models or custom ones: only
// the two grouped GEMMs, the steps between them, and the whole layer from the router's logits on,
// as a CUDA graph. e4m3: weights with a scale per row, rows quantized before each GEMM; activations
// and results are bf16. Further JSON fields: `other`, with rows sorted first instead of gathered by
// the GEMM, or vice versa; `otherwise`, with block pairs and single blocks exchanged; `beside_N`,
// with N blocks that sort rows during the first GEMM. Candidates in random order with idle gaps, L2
// flushed; medians. Checked in the same run: sampled rows against f64 sums on the host, and bits
// that are equal in two runs. Prints one JSON object per line. --backward: see gpu_moe_backward.cc.
#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "bench/gpu_moe_case.h"
#include "codec/quantize.h"
#include "core/cuda/graph.h"
#include "core/version.h"
#include "gemm/cuda/gemm_lt.h"
#include "overlap/moe/cuda/one_gpu.h"
#include "tandem/error.h"

namespace tandem {
namespace {

using namespace gpu;
using namespace moe_bench;

constexpr int kSampledRows = 2, kSampledColumns = 16;

/// Rows [first, first + count) of a weight; e4m3 codes are multiplied by their scales.
std::vector<float> weight_rows(const Tensor& weight, const Tensor& scales, int64_t first,
                               int64_t count, cudaStream_t stream) {
  const int64_t columns = weight.dim(1);
  const size_t values = size_t(count * columns);
  std::vector<float> all(values);
  if (weight.dtype() == DType::bf16) {
    const auto bits = read<BFloat16>(weight.as<BFloat16>() + first * columns, values, stream);
    for (size_t i = 0; i < values; ++i) all[i] = bits[i].to_float();
    return all;
  }
  const auto codes = read<Float8E4M3>(weight.as<Float8E4M3>() + first * columns, values, stream);
  const auto factors = read<float>(scales.as<float>() + first, size_t(count), stream);
  for (size_t i = 0; i < values; ++i) {
    all[i] = codes[i].to_float() * factors[i / size_t(columns)];
  }
  return all;
}

/// Row as seen by a GEMM with e4m3 weights.
std::vector<double> quantized(const std::vector<double>& row) {
  const auto columns = int64_t(row.size());
  std::vector<BFloat16> values;
  for (const double value : row) values.push_back(BFloat16::from_float(float(value)));
  std::vector<Float8E4M3> codes(row.size());
  float scale = 0;
  quantize_rows_on_cpu(Tensor::of(std::span(values), {1, columns}),
                       Tensor::of(std::span(codes), {1, columns}),
                       Tensor::of(std::span(&scale, 1), {1}));
  std::vector<double> found;
  for (const Float8E4M3 code : codes) found.push_back(double(code.to_float()) * double(scale));
  return found;
}

/// Largest error of sampled rows, relative to the largest result. The reference rounds inner
/// activations to bf16, and quantizes rows for e4m3 weights, as the layer does.
double worst_error(const Operands& o, const MoeWeights& w, cudaStream_t stream) {
  const Model& m = o.model;
  const auto experts = read<int32_t>(o.experts.data(), size_t(o.rows * m.top_k), stream);
  const auto weights = read<float>(o.weights.data(), experts.size(), stream);
  double worst = 0, largest = 0;
  for (int sample = 0; sample < kSampledRows; ++sample) {
    const int64_t row = o.rows * (2 * sample + 1) / (2 * kSampledRows);
    auto x = row_of(o.x_view(), row, stream);
    if (w.e4m3()) x = quantized(x);
    const auto found = row_of(o.result(), row, stream);
    std::vector<double> expected(kSampledColumns, 0);
    for (int k = 0; k < m.top_k; ++k) {
      const size_t routing_idx = size_t(row * m.top_k + k);
      const int64_t first = experts[routing_idx] * 2 * m.ffn;
      std::vector<double> inner;
      const auto rows = weight_rows(w.in, w.scales.w_in, first, 2 * m.ffn, stream);
      for (int64_t f = 0; f < m.ffn; ++f) {
        double gate = 0, up = 0;
        for (int64_t i = 0; i < m.hidden; ++i) {
          gate += x[size_t(i)] * double(rows[size_t(f * m.hidden + i)]);
          up += x[size_t(i)] * double(rows[size_t((m.ffn + f) * m.hidden + i)]);
        }
        const double value = gate / (1 + std::exp(-gate)) * up;
        inner.push_back(double(BFloat16::from_float(float(value)).to_float()));
      }
      if (w.e4m3()) inner = quantized(inner);
      for (int c = 0; c < kSampledColumns; ++c) {
        const int64_t column = m.hidden * c / kSampledColumns;
        const auto of_out =
            weight_rows(w.out, w.scales.w_out, experts[routing_idx] * m.hidden + column, 1, stream);
        expected[size_t(c)] += double(weights[routing_idx]) *
                               dot(inner, std::vector<double>(of_out.begin(), of_out.end()));
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

/// The host's sums differ slightly from the layer's, so a value between two codes may round to
/// either, and a row's scale may differ by one step of bf16.
constexpr double kMaxError = 0.02, kMaxErrorOfCodes = 0.04;

struct ConcurrentCase {
  int blocks;
  std::unique_ptr<LocalMoe> layer;
  std::unique_ptr<Graph> graph;
};

/// GEMMs that traverse K in the opposite direction differ in their last bits.
bool are_near(const std::vector<uint16_t>& found, const std::vector<uint16_t>& expected) {
  double largest = 0, worst = 0;
  for (size_t i = 0; i < found.size(); ++i) {
    const double value = double(BFloat16{found[i]}.to_float()),
                 wanted = double(BFloat16{expected[i]}.to_float());
    largest = std::max(largest, std::abs(wanted));
    worst = std::isfinite(value) ? std::max(worst, std::abs(value - wanted)) : HUGE_VAL;
  }
  return worst < kMaxError * largest;
}

void bench(const Model& m, int64_t tokens, bool e4m3) {
  const Stream custom;
  const cudaStream_t stream = custom.get();
  const Operands o(m, tokens);
  const ReadingFlush flush(stream);
  uint64_t number = 1;
  for (const Tensor& tensor : {o.x_view(), o.router_view(), o.in_view(), o.out_view()}) {
    fill_uniform(tensor, kSeed, number++, 0, stream);
  }
  const LtContext lt;
  const LtGemm logits_gemm(lt, {tokens, m.router_rows(), m.hidden, DType::bf16, DType::f32});
  const RouterOptions options{m.top_k, false, true};
  const MoeShape shape = shape_of(m, tokens);
  std::optional<CodedWeights> coded;
  if (e4m3) coded.emplace(o, stream);
  const MoeWeights w = weights_of(o, coded ? &*coded : nullptr);
  const LocalMoeForm form = form_of(shape, false, e4m3);
  LocalMoe layer(shape, form);
  LocalMoeForm of_steps = form;  // sequential
  of_steps.sorting_blocks = 0;
  LocalMoe steps(shape, of_steps);
  LocalMoe other(shape, {.sorts_first = !form.sorts_first, .e4m3 = e4m3, .pairs = form.pairs});
  LocalMoe otherwise(shape, {.sorts_first = form.sorts_first, .e4m3 = e4m3, .pairs = !form.pairs});
  const auto route = [&] {
    logits_gemm.run(o.x.data(), o.w_router.data(), o.logits.data(), nullptr, stream);
    route_forward(stream, o.logits.view(DType::f32, {tokens, m.router_rows()}), o.router_bias(),
                  options, {}, o.routing().experts, o.routing().weights);
  };
  const auto all = [&] {
    route();
    layer.forward(o.x_view(), o.routing(), w.in, w.out, o.result(), stream, w.scales);
  };
  const auto all_of_other = [&] {
    route();
    other.forward(o.x_view(), o.routing(), w.in, w.out, o.result(), stream, w.scales);
  };
  std::vector<ConcurrentCase> concurrent;
  if (!e4m3 && tokens * m.top_k >= kGroupedRows * int64_t(m.experts)) {
    for (const int blocks : {8, 12, 16}) {
      const LocalMoeForm sorting{
          .sorts_first = true, .pairs = form.pairs, .sorting_blocks = blocks};
      concurrent.push_back({blocks, std::make_unique<LocalMoe>(shape, sorting), {}});
    }
  }
  all_of_other();
  steps.forward(o.x_view(), o.routing(), w.in, w.out, o.result(), stream, w.scales);
  otherwise.forward(o.x_view(), o.routing(), w.in, w.out, o.result(), stream, w.scales);
  all();
  const size_t results = size_t(tokens * m.hidden);
  const auto once = read<uint16_t>(o.out.data(), results, stream);
  const Graph graph(stream, all), graph_of_other(stream, all_of_other);
  bool near = true;
  for (ConcurrentCase& c : concurrent) {
    const auto forward = [&, of = c.layer.get()] {
      route();
      of->forward(o.x_view(), o.routing(), w.in, w.out, o.result(), stream);
    };
    forward();
    near = near && are_near(read<uint16_t>(o.out.data(), results, stream), once);
    c.graph = std::make_unique<Graph>(stream, forward);
  }
  LocalMoe& sorts = form.sorts_first ? steps : other;
  LocalMoe& gathers = form.sorts_first ? other : steps;
  std::vector<Candidate> candidates{
      {"in", [&] { steps.multiply_in(o.x_view(), w.in, stream, w.scales); }, {}},
      {"out", [&] { steps.multiply_out(w.out, stream, w.scales); }, {}},
      {"products",
       [&] {
         steps.multiply_in(o.x_view(), w.in, stream, w.scales);
         steps.multiply_out(w.out, stream, w.scales);
       },
       {}},
      {"route", route, {}},
      {"permute", [&] { steps.permute(o.routing(), stream); }, {}},
      {"sum", [&] { steps.sum(o.routing(), o.result(), stream); }, {}},
      {"layer", [&] { graph.launch(stream); }, {}},
      {"gather", [&] { sorts.prepare(o.x_view(), stream); }, {}},
      {"other_in", [&] { other.multiply_in(o.x_view(), w.in, stream, w.scales); }, {}},
      {"other_layer", [&] { graph_of_other.launch(stream); }, {}},
      {"otherwise_in", [&] { otherwise.multiply_in(o.x_view(), w.in, stream, w.scales); }, {}},
      {"otherwise_out", [&] { otherwise.multiply_out(w.out, stream, w.scales); }, {}}};
  if (e4m3) {
    candidates.push_back({"quantize_x", [&] { gathers.prepare(o.x_view(), stream); }, {}});
    candidates.push_back({"quantize_inner", [&] { steps.quantize_inner(stream); }, {}});
  }
  for (const ConcurrentCase& c : concurrent) {
    candidates.push_back({fmt::format("beside_{}", c.blocks),
                          [of = c.graph.get(), stream] { of->launch(stream); },
                          {}});
  }
  measure(candidates, kRepeats, flush, stream);
  graph.launch(stream);
  const bool same = read<uint16_t>(o.out.data(), results, stream) == once;
  const double error = worst_error(o, w, stream);
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
      "{{\"model\":\"{}\",\"dtype\":\"{}\",\"tokens\":{},\"commit\":\"{}\",\"sorts_first\":{},"
      "\"pairs\":{},\"sorting_blocks\":{},\"touched_experts\":{},\"touched_bytes\":{},\"time_us\":{"
      "{{}}},\"tflops\":{{"
      "\"in\":"
      "{:.0f},\"out\":{:.0f},\"layer\":{:.0f}}},\"layer_of_products\":{:.3f},\"worst_error\":{:.2e}"
      ","
      "\"same_bits\":{}}}\n",
      m.name, name_of(w.in.dtype()), tokens, kCommit, form.sorts_first, form.pairs,
      form.sorting_blocks, touched, touched * 3 * m.hidden * m.ffn * int64_t(size_of(w.in.dtype())),
      times, 2 * flops / time(0) / 1e6, flops / time(1) / 1e6, 3 * flops / time(6) / 1e6,
      time(6) / time(2), error, same);
  std::fflush(stdout);
  if (!same || !near || !(error < (e4m3 ? kMaxErrorOfCodes : kMaxError))) {
    throw Error("gpu_moe_bench: wrong results");
  }
}

}  // namespace
}  // namespace tandem

namespace {

/// Removes an option and its value from the arguments and returns the value; "" if absent.
std::string take_value(std::vector<std::string>& arguments, const std::string& name) {
  const auto option = std::ranges::find(arguments, name);
  if (option == arguments.end()) return "";
  if (option + 1 == arguments.end()) {
    throw tandem::InvalidArgument(fmt::format("{}: expected a value", name));
  }
  const std::string value = option[1];
  arguments.erase(option, option + 2);
  return value;
}

int64_t take_size(std::vector<std::string>& arguments, const std::string& name) {
  const std::string text = take_value(arguments, name);
  int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (!text.empty() && (error != std::errc() || end != text.data() + text.size() || value < 1)) {
    throw tandem::InvalidArgument(fmt::format("{} {}: expected a number from 1 on", name, text));
  }
  return value;
}

}  // namespace

int main(int argc, char** argv) {
  using namespace tandem;
  try {
    std::vector<std::string> names(argv + 1, argv + argc);
    const bool backward = std::erase(names, "--backward") > 0;
    const std::string dtype = take_value(names, "--dtype");
    if (!dtype.empty() && dtype != "bf16" && dtype != "e4m3") {
      throw InvalidArgument(fmt::format("--dtype {}: expected bf16 or e4m3", dtype));
    }
    const bool e4m3 = dtype == "e4m3";
    if (e4m3 && backward) throw InvalidArgument("--backward: expected --dtype bf16");
    const Model custom{"custom", int(take_size(names, "--experts")),
                       int(take_size(names, "--top-k")), take_size(names, "--hidden"),
                       take_size(names, "--ffn")};
    const bool has_custom =
        custom.experts > 0 && custom.top_k > 0 && custom.hidden > 0 && custom.ffn > 0;
    if (!has_custom &&
        (custom.experts > 0 || custom.top_k > 0 || custom.hidden > 0 || custom.ffn > 0)) {
      throw InvalidArgument("--experts, --top-k, --hidden, --ffn: expected all of them, or none");
    }
    std::vector<Model> models(std::begin(kModels), std::end(kModels));
    if (has_custom) models = {custom};
    for (const Model& model : models) {
      const bool wanted =
          names.empty() || std::ranges::count(names, std::string_view(model.name)) > 0;
      if (!wanted) continue;
      if (!backward) {
        for (const int64_t tokens : {16, 64, 256, 1024, 4096, 8192}) bench(model, tokens, e4m3);
      } else if (model.experts < 256) {  // gradients fit into 80 GB in addition to the weights
        for (const int64_t tokens : {1024, 4096, 8192}) bench_backward(model, tokens);
      }
    }
  } catch (const std::exception& error) {
    fmt::print(stderr, "{}\n", error.what());
    return 1;
  }
}
