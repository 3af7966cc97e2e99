// One Mixture-of-Experts problem, whole and sharded.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <span>
#include <string>
#include <vector>

#include "overlap/moe/load.h"
#include "tandem/collectives.h"
#include "tandem/moe.h"
#include "tandem/random.h"
#include "tests/overlap/moe/reference.h"

namespace tandem::test {

struct LayerCase {
  int ep = 1, tp = 1, experts = 1, top_k = 1;
  int64_t rows = 0, hidden = 8, ffn = 8;
  double imbalance = 1;
  DType dtype = DType::f32;
  int world() const { return ep * tp; }
  std::string describe() const {
    return "ep " + std::to_string(ep) + " tp " + std::to_string(tp) + " E " +
           std::to_string(experts) + " k " + std::to_string(top_k) + " rows " +
           std::to_string(rows) + " hidden " + std::to_string(hidden) + " ffn " +
           std::to_string(ffn) + " imbalance " + std::to_string(imbalance);
  }
};

/// Cases [begin, end) of a suite for worlds of `ranks` ranks.
struct Cases {
  int ranks, begin, end;
};
inline std::string world_name(const testing::TestParamInfo<Cases>& test) {
  return std::to_string(test.param.ranks) + "_ranks";
}

/// `count` cases for worlds of `world` ranks.
inline std::vector<LayerCase> generated(int world, int count) {
  std::vector<LayerCase> cases;
  for (int i = 0; i < count; ++i) {
    const auto r = philox(21, uint64_t(world), uint64_t(i));
    const auto q = philox(22, uint64_t(world), uint64_t(i));
    LayerCase c;
    std::vector<int> divisors;
    for (int d = 1; d <= world; ++d) {
      if (world % d == 0) divisors.push_back(d);
    }
    c.tp = divisors[r[0] % divisors.size()];
    c.ep = world / c.tp;
    c.experts = c.ep * int(1 + r[1] % 5);
    c.top_k = 1 + int(r[2] % uint32_t(std::min(c.experts, 6)));
    constexpr int64_t kRows[] = {0, 1, 3, 8, 17, 40, 64, 97};
    c.rows = kRows[r[3] % 8];
    c.hidden = 8 * int64_t(1 + q[0] % 12);
    c.ffn = 8 * int64_t(1 + q[1] % 6);
    const double imbalances[] = {1, 2, 4, double(c.ep), 0};
    c.imbalance = std::min(imbalances[q[2] % 5], double(c.ep));
    c.dtype = q[3] % 4 == 0 ? DType::bf16 : DType::f32;
    cases.push_back(c);
  }
  return cases;
}

/// Random numbers rounded to `dtype`, so that the reference sees the same values.
inline std::vector<float> numbers(DType dtype, int64_t count, uint64_t stream, float scale = 1) {
  std::vector<float> values(static_cast<size_t>(count));
  fill_normal(values, 11, stream);
  for (float& v : values) {
    v *= scale;
    if (dtype != DType::f32) v = BFloat16::from_float(v).to_float();
  }
  return values;
}

/// Tensor of `dtype` that owns its memory.
struct Owned {
  Memory memory;
  Tensor tensor;
  Owned(DType dtype, int64_t rows, int64_t columns)
      : memory(size_t(rows * columns) * size_of(dtype)),
        tensor(memory.view(dtype, {rows, columns})) {}
  void set(int64_t row, int64_t column, float value) {
    const int64_t at = row * tensor.dim(1) + column;
    if (tensor.dtype() == DType::f32) {
      tensor.as<float>()[at] = value;
    } else {
      tensor.as<BFloat16>()[at] = BFloat16::from_float(value);
    }
  }
  std::vector<float> values() const {
    std::vector<float> all;
    for (int64_t i = 0; i < tensor.elements(); ++i) {
      all.push_back(tensor.dtype() == DType::f32 ? tensor.as<float>()[i]
                                                 : tensor.as<BFloat16>()[i].to_float());
    }
    return all;
  }
};

/// The whole problem, as on a single process.
struct Whole {
  LayerCase c;
  std::vector<float> x, dout, w_in, w_out, weights;
  std::vector<int32_t> chosen;
  explicit Whole(const LayerCase& layer)
      : c(layer),
        x(numbers(c.dtype, c.rows * c.hidden, 1)),
        dout(numbers(c.dtype, c.rows * c.hidden, 2)),
        w_in(numbers(c.dtype, c.experts * 2 * c.ffn * c.hidden, 3, 1 / std::sqrt(float(c.hidden)))),
        w_out(numbers(c.dtype, c.experts * c.hidden * c.ffn, 4, 1 / std::sqrt(float(c.ffn)))),
        weights(size_t(c.rows * c.top_k)),
        chosen(chosen_experts({c.experts, c.ep, c.tp}, c.top_k, {c.imbalance, 5}, 0, c.rows)) {
    for (size_t i = 0; i < weights.size(); ++i) weights[i] = 0.1f + uniform(6, 1, i);
  }
  MoeProblem problem() const {
    return {c.rows, c.hidden, c.ffn, c.experts, c.top_k, chosen, weights, x, w_in, w_out};
  }
};

/// One rank's shard and results.
class RankLayer {
 public:
  RankLayer(const Whole& whole, int rank)
      : c_(whole.c),
        local_(shard_of(c_.rows, c_.world(), rank)),
        experts_(shard_of(c_.experts, c_.ep, rank / c_.tp)),
        shard_(shard_of(c_.ffn, c_.tp, rank % c_.tp)),
        x(c_.dtype, local_.count, c_.hidden),
        dout(c_.dtype, local_.count, c_.hidden),
        w_in(c_.dtype, experts_.count * 2 * shard_.count, c_.hidden),
        w_out(c_.dtype, experts_.count * c_.hidden, shard_.count),
        out(c_.dtype, local_.count, c_.hidden),
        dx(c_.dtype, local_.count, c_.hidden),
        dweights(DType::f32, local_.count, c_.top_k),
        dw_in(DType::f32, w_in.tensor.dim(0), c_.hidden),
        dw_out(DType::f32, w_out.tensor.dim(0), shard_.count) {
    for (int64_t i = 0; i < local_.count; ++i) {
      for (int64_t j = 0; j < c_.hidden; ++j) {
        x.set(i, j, whole.x[size_t((local_.begin + i) * c_.hidden + j)]);
        dout.set(i, j, whole.dout[size_t((local_.begin + i) * c_.hidden + j)]);
      }
    }
    const size_t first = size_t(local_.begin * c_.top_k), count = size_t(local_.count * c_.top_k);
    chosen.assign(whole.chosen.begin() + int64_t(first),
                  whole.chosen.begin() + int64_t(first + count));
    weights.assign(whole.weights.begin() + int64_t(first),
                   whole.weights.begin() + int64_t(first + count));
    for_each_weight([&](Owned& t, Owned&, int64_t row, int64_t column, size_t at, bool in) {
      t.set(row, column, in ? whole.w_in[at] : whole.w_out[at]);
    });
  }

  MoeShape shape() const {
    const int64_t maximum = shard_of(c_.rows, c_.world(), 0).count;
    return {maximum, c_.hidden, c_.ffn, c_.experts, c_.top_k, c_.tp, c_.dtype};
  }
  MoeRouting routing() {
    return {Tensor::of(std::span(chosen), {local_.count, c_.top_k}),
            Tensor::of(std::span(weights), {local_.count, c_.top_k})};
  }
  /// Runs forward and backward of a MoeLayer and a MoeBatch, or of their implementation types.
  template <typename Layer, typename Batch>
  void run(Layer& layer, Batch& batch) {
    std::memset(dw_in.memory.data(), 0, dw_in.memory.bytes());
    std::memset(dw_out.memory.data(), 0, dw_out.memory.bytes());
    layer.forward(x.tensor, routing(), w_in.tensor, w_out.tensor, out.tensor, batch);
    layer.backward(dout.tensor, w_in.tensor, w_out.tensor, batch, dx.tensor, dweights.tensor,
                   dw_in.tensor, dw_out.tensor);
  }
  std::vector<std::vector<float>> results() const {
    return {out.values(), dx.values(), dweights.values(), dw_in.values(), dw_out.values()};
  }

  /// Largest error relative to the largest value, over all results.
  double error(const std::vector<double>& reference, const MoeGradients& gradients) {
    double worst = 0;
    const auto rows = [&](const Owned& t, const std::vector<double>& all, int64_t width) {
      compare(t.values(), size_t(local_.begin * width), all, worst);
    };
    rows(out, reference, c_.hidden);
    rows(dx, gradients.dx, c_.hidden);
    rows(dweights, gradients.dweights, c_.top_k);
    double in = 0, back = 0, in_size = 1e-30, back_size = 1e-30;
    for (const double value : gradients.dw_in) in_size = std::max(in_size, std::abs(value));
    for (const double value : gradients.dw_out) back_size = std::max(back_size, std::abs(value));
    for_each_weight([&](Owned&, Owned& d, int64_t row, int64_t column, size_t at, bool is_in) {
      const double want = is_in ? gradients.dw_in[at] : gradients.dw_out[at];
      const double got = double(d.tensor.as<float>()[row * d.tensor.dim(1) + column]);
      double& error = is_in ? in : back;
      error = std::max(error, std::abs(got - want));
    });
    return std::max({worst, in / in_size, back / back_size});
  }

 private:
  /// Calls body(weight, its gradient, row, column, index in the whole, whether it is w_in).
  template <typename Body>
  void for_each_weight(const Body& body) {
    const int64_t f = shard_.count;
    for (int64_t e = 0; e < experts_.count; ++e) {
      const int64_t whole = experts_.begin + e;
      for (int64_t i = 0; i < 2 * f; ++i) {
        const int64_t row = (i < f ? 0 : c_.ffn) + shard_.begin + i % f;
        for (int64_t j = 0; j < c_.hidden; ++j) {
          body(w_in, dw_in, e * 2 * f + i, j, size_t((whole * 2 * c_.ffn + row) * c_.hidden + j),
               true);
        }
      }
      for (int64_t h = 0; h < c_.hidden; ++h) {
        for (int64_t i = 0; i < f; ++i) {
          body(w_out, dw_out, e * c_.hidden + h, i,
               size_t((whole * c_.hidden + h) * c_.ffn + shard_.begin + i), false);
        }
      }
    }
  }
  /// Compares `got` with elements [begin, ...) of `all`.
  static void compare(const std::vector<float>& got, size_t begin, const std::vector<double>& all,
                      double& worst) {
    double error = 0, size = 1e-30;
    for (const double value : all) size = std::max(size, std::abs(value));
    for (size_t i = 0; i < got.size(); ++i) {
      error = std::max(error, std::abs(double(got[i]) - all[begin + i]));
    }
    worst = std::max(worst, error / size);
  }

  LayerCase c_;
  Shard local_, experts_, shard_;

 public:
  Owned x, dout, w_in, w_out, out, dx, dweights, dw_in, dw_out;
  std::vector<int32_t> chosen;
  std::vector<float> weights;
};

}  // namespace tandem::test
