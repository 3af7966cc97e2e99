// Backward passes of gpu_moe_bench's layers: only the four grouped GEMMs, the steps between them,
// and the whole pass as a CUDA graph; also forward passes that save activations. Checked in the
// same run: samples of every gradient against f64 sums on the host, rounded where the layer rounds,
// and bits that are equal in two runs.
#include <fmt/format.h>

#include <cmath>
#include <cstdio>

#include "bench/gpu_moe_case.h"
#include "bench/moe_gradients.h"
#include "core/cuda/graph.h"
#include "core/version.h"
#include "gemm/cuda/gemm_lt.h"
#include "overlap/moe/cuda/one_gpu.h"
#include "overlap/moe/cuda/permute.h"
#include "tandem/error.h"

namespace tandem::moe_bench {
namespace {

constexpr int64_t kSamples = 16;  // per row of a gradient

/// Gradients, and their reference values.
struct Gradients {
  Gradients(const Model& m, int64_t tokens)
      : dout(Operands::bytes(tokens * m.hidden)),
        dx(dout.bytes()),
        dweights(size_t(tokens * m.top_k) * 4),
        dw_in(size_t(m.experts * 2 * m.ffn * m.hidden) * 4),
        dw_out(size_t(m.experts * m.hidden * m.ffn) * 4) {}
  DeviceMemory dout, dx, dweights, dw_in, dw_out;
};

/// Host copies of the operands of samples.
class Reference {
 public:
  Reference(const Operands& o, const Gradients& g, cudaStream_t stream)
      : o_(o), g_(g), m_(o.model), stream_(stream) {
    x_ = floats(o.x.data(), o.rows * m_.hidden);
    dout_ = floats(g.dout.data(), o.rows * m_.hidden);
    experts_ = read<int32_t>(o.experts.data(), size_t(o.rows * m_.top_k), stream);
    weights_ = read<float>(o.weights.data(), experts_.size(), stream);
  }

  /// Checks a token: its gradient, and those of its routing weights.
  void check_row(int64_t row, SampledErrors& of_dx, SampledErrors& of_dweights) const {
    std::vector<double> dx(size_t(m_.hidden), 0.0);
    const auto dweights = read<float>(g_.dweights.data(), experts_.size(), stream_);
    for (int k = 0; k < m_.top_k; ++k) {
      const size_t routing_idx = size_t(row * m_.top_k + k);
      const auto in = w_in(experts_[routing_idx]), out = w_out(experts_[routing_idx]);
      std::vector<double> d_act(size_t(m_.ffn), 0.0);
      for (int64_t h = 0; h < m_.hidden; ++h) {
        const double by = double(dout_[size_t(row * m_.hidden + h)]);
        for (int64_t f = 0; f < m_.ffn; ++f) {
          d_act[size_t(f)] += by * double(out[size_t(h * m_.ffn + f)]);
        }
      }
      double dot = 0;
      for (int64_t f = 0; f < m_.ffn; ++f) {
        const float *of_gate = &in[size_t(f * m_.hidden)],
                    *of_up = &in[size_t((m_.ffn + f) * m_.hidden)];
        const GateSample t(of_row(row, of_gate), of_row(row, of_up), d_act[size_t(f)],
                           double(weights_[routing_idx]));
        dot += t.dot;
        for (int64_t h = 0; h < m_.hidden; ++h) {
          dx[size_t(h)] += t.dgate * double(of_gate[h]) + t.dup * double(of_up[h]);
        }
      }
      of_dweights.add(double(dweights[routing_idx]), dot);
    }
    const auto found = floats(g_.dx.data() + size_t(row * m_.hidden) * 2, m_.hidden);
    for (int64_t h = 0; h < m_.hidden; ++h) of_dx.add(double(found[size_t(h)]), dx[size_t(h)]);
  }

  /// Checks inner feature `f` of an expert: samples of the weight gradients, over all of its rows.
  void check_feature(int expert, int64_t f, SampledErrors& of_in, SampledErrors& of_out) const {
    const auto in = w_in(expert), out = w_out(expert);
    std::vector<float> column(static_cast<size_t>(m_.hidden));
    for (int64_t h = 0; h < m_.hidden; ++h) column[size_t(h)] = out[size_t(h * m_.ffn + f)];
    std::vector<double> gate(size_t(kSamples), 0.0), up = gate, down = gate;
    for (size_t routing_idx = 0; routing_idx < experts_.size(); ++routing_idx) {
      if (experts_[routing_idx] != expert) continue;
      const auto row = int64_t(routing_idx) / m_.top_k;
      double d_act = 0;
      for (int64_t h = 0; h < m_.hidden; ++h) {
        d_act += double(dout_[size_t(row * m_.hidden + h)]) * double(column[size_t(h)]);
      }
      const GateSample t(of_row(row, &in[size_t(f * m_.hidden)]),
                         of_row(row, &in[size_t((m_.ffn + f) * m_.hidden)]), d_act,
                         double(weights_[routing_idx]));
      for (int64_t i = 0; i < kSamples; ++i) {
        const size_t at = size_t(row * m_.hidden + feature(i));
        gate[size_t(i)] += t.dgate * double(x_[at]);
        up[size_t(i)] += t.dup * double(x_[at]);
        down[size_t(i)] += t.scaled * double(dout_[at]);
      }
    }
    const int64_t first = int64_t(expert) * 2 * m_.ffn;
    for (int64_t i = 0; i < kSamples; ++i) {
      of_in.add(one(g_.dw_in, (first + f) * m_.hidden + feature(i)), gate[size_t(i)]);
      of_in.add(one(g_.dw_in, (first + m_.ffn + f) * m_.hidden + feature(i)), up[size_t(i)]);
      of_out.add(one(g_.dw_out, (expert * m_.hidden + feature(i)) * m_.ffn + f), down[size_t(i)]);
    }
  }

 private:
  int64_t feature(int64_t sample) const { return sample * m_.hidden / kSamples; }
  double of_row(int64_t row, const float* by) const {
    double sum = 0;
    for (int64_t h = 0; h < m_.hidden; ++h) {
      sum += double(x_[size_t(row * m_.hidden + h)]) * double(by[h]);
    }
    return sum;
  }
  std::vector<float> floats(const std::byte* device, int64_t count) const {
    std::vector<float> all;
    all.reserve(size_t(count));
    for (const BFloat16 value : read<BFloat16>(device, size_t(count), stream_)) {
      all.push_back(value.to_float());
    }
    return all;
  }
  double one(const DeviceMemory& memory, int64_t at) const {
    return double(read<float>(memory.data() + size_t(at) * 4, 1, stream_)[0]);
  }
  std::vector<float> w_in(int expert) const {
    const int64_t count = 2 * m_.ffn * m_.hidden;
    return floats(o_.w_in.data() + size_t(expert * count) * 2, count);
  }
  std::vector<float> w_out(int expert) const {
    const int64_t count = m_.hidden * m_.ffn;
    return floats(o_.w_out.data() + size_t(expert * count) * 2, count);
  }

  const Operands& o_;
  const Gradients& g_;
  const Model& m_;
  cudaStream_t stream_;
  std::vector<float> x_, dout_;
  std::vector<int32_t> experts_;
  std::vector<float> weights_;
};

}  // namespace

void bench_backward(const Model& m, int64_t tokens) {
  const Stream local;
  const cudaStream_t stream = local.get();
  const Operands o(m, tokens);
  const Gradients g(m, tokens);
  const ReadingFlush flush(stream);
  const Tensor dout = g.dout.view(DType::bf16, {tokens, m.hidden}),
               dx = g.dx.view(DType::bf16, {tokens, m.hidden}),
               dweights = g.dweights.view(DType::f32, {tokens, m.top_k}),
               dw_in = g.dw_in.view(DType::f32, {m.experts * 2 * m.ffn, m.hidden}),
               dw_out = g.dw_out.view(DType::f32, {m.experts * m.hidden, m.ffn});
  uint64_t number = 1;
  for (const Tensor& tensor : {o.x_view(), o.router_view(), o.in_view(), o.out_view(), dout}) {
    fill_uniform(tensor, kSeed, number++, 0, stream);
  }
  const LtContext lt;
  const LtGemm logits(lt, {tokens, m.router_rows(), m.hidden, DType::bf16, DType::f32});
  logits.run(o.x.data(), o.w_router.data(), o.logits.data(), nullptr, stream);
  route_forward(stream, o.logits.view(DType::f32, {tokens, m.router_rows()}), o.router_bias(),
                RouterOptions{m.top_k, false, true}, {}, o.routing().experts, o.routing().weights);
  const MoeShape shape = shape_of(m, tokens);
  LocalMoe layer(shape, form_of(shape, true));
  const auto forward = [&] {
    layer.forward(o.x_view(), o.routing(), o.in_view(), o.out_view(), o.result(), stream);
  };
  const auto backward = [&] {
    layer.backward(dout, o.routing(), o.in_view(), o.out_view(), dx, dweights, dw_in, dw_out,
                   stream);
  };
  forward();
  backward();
  SampledErrors of_dx, of_dweights, of_in, of_out;
  const Reference reference(o, g, stream);
  reference.check_row(tokens / 3, of_dx, of_dweights);
  for (const int i : {1, 2}) {
    reference.check_feature(m.experts * i / 3, m.ffn * i / 3 + i, of_in, of_out);
  }
  const size_t values = size_t(tokens * m.hidden);
  const auto once = read<uint16_t>(g.dx.data(), values, stream);
  const Graph forward_graph(stream, forward), backward_graph(stream, backward);
  ExpertGradients& gradients = layer.gradients();
  const auto d_act = [&] { gradients.multiply_d_act(o.w_out.data(), stream); };
  const auto of_x = [&] { gradients.multiply_dx(o.w_in.data(), stream); };
  const auto weights_in = [&] { layer.add_dw_in(dw_in, stream); };
  const auto weights_out = [&] { layer.add_dw_out(dw_out, stream); };
  std::vector<Candidate> candidates{
      {"gather", [&] { layer.gather_dout(dout, stream); }, {}},
      {"d_act", d_act, {}},
      {"gate", [&] { layer.gate_backward(o.routing(), dweights, stream); }, {}},
      {"dx", of_x, {}},
      {"sum", [&] { layer.sum_dx(dx, stream); }, {}},
      {"dw_in", weights_in, {}},
      {"dw_out", weights_out, {}},
      {"products",
       [&] {
         d_act();
         of_x();
         weights_in();
         weights_out();
       },
       {}},
      {"backward", [&] { backward_graph.launch(stream); }, {}},
      {"gather_x", [&] { layer.prepare(o.x_view(), stream); }, {}},
      {"in", [&] { layer.multiply_in(o.x_view(), o.in_view(), stream); }, {}},
      {"gate_forward", [&] { layer.gate(stream); }, {}},
      {"forward", [&] { forward_graph.launch(stream); }, {}}};
  measure(candidates, kRepeats, flush, stream);
  forward_graph.launch(stream);
  backward_graph.launch(stream);
  const bool same = read<uint16_t>(g.dx.data(), values, stream) == once;
  const double worst =
      std::max({of_dx.value(), of_dweights.value(), of_in.value(), of_out.value()});
  std::string times;
  double products = 0, all = 0;
  for (const Candidate& c : candidates) {
    const double us = median(c.us);
    times += fmt::format("{}\"{}\":{:.1f}", times.empty() ? "" : ",", c.name, us);
    if (c.name == "products") products = us;
    if (c.name == "backward") all = us;
  }
  const double flops = 12.0 * double(tokens * m.top_k) * double(m.hidden) * double(m.ffn);
  fmt::print(
      "{{\"model\":\"{}\",\"tokens\":{},\"pass\":\"backward\",\"commit\":\"{}\",\"time_us\":{{{}}},"
      "\"tflops\":{{\"products\":{:.0f},\"backward\":{:.0f}}},\"backward_of_products\":{:.3f},"
      "\"errors\":{{\"dx\":{:.2e},\"dweights\":{:.2e},\"dw_in\":{:.2e},\"dw_out\":{:.2e}}},"
      "\"same_bits\":{}}}\n",
      m.name, tokens, kCommit, times, flops / products / 1e6, flops / all / 1e6, all / products,
      of_dx.value(), of_dweights.value(), of_in.value(), of_out.value(), same);
  std::fflush(stdout);
  if (!same || !(worst < 0.02)) throw Error("gpu_moe_bench: wrong gradients");
}

}  // namespace tandem::moe_bench
