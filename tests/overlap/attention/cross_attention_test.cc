// The cross-attention layer on ranks against a reference in double of one process, over generated
// shapes: results, gradients, what a batch holds, bytes that are sent, and refusals.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <mutex>
#include <random>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "overlap/attention/reference.h"
#include "tandem/collectives.h"
#include "tandem/cross_attention.h"
#include "tandem/error.h"
#include "tandem/random.h"
#include "tandem/world.h"
#include "tests/error_of.h"

namespace tandem::test {
namespace {

using Doubles = std::vector<double>;

struct Case {
  int ranks;
  CrossAttentionShape shape;
  std::string describe() const {
    return fmt::format(
        "ranks {} batch {} text {} visual {} hidden {} features {} heads {}/{} of {} "
        "{}{}",
        ranks, shape.batch, shape.text, shape.visual, shape.hidden, shape.features, shape.heads,
        shape.kv_heads, shape.head_dim, name_of(shape.dtype), shape.gate ? " gate" : "");
  }
};

std::vector<Case> generate(int count, DType dtype) {
  std::mt19937 random(11);
  const auto one_of = [&](std::initializer_list<int64_t> values) {
    return values.begin()[random() % values.size()];
  };
  std::vector<Case> cases;
  for (int i = 0; i < count; ++i) {
    Case c{1 + i % 4, {.dtype = dtype}};
    CrossAttentionShape& s = c.shape;
    s.batch = one_of({1, 2});
    s.text = one_of({1, 2, 3, 7, 12});
    s.visual = one_of({1, 3, 16, 40});
    s.hidden = one_of({4, 10});
    s.features = one_of({3, 12});
    s.kv_heads = one_of({1, 2});
    s.heads = s.kv_heads * one_of({1, 2});
    s.head_dim = one_of({2, 6});
    s.gate = random() % 2 == 0;
    cases.push_back(c);
  }
  return cases;
}

float rounded(DType dtype, float value) {
  return dtype == DType::f32 ? value : BFloat16::from_float(value).to_float();
}

/// Whole matrix of random values of the dtype.
struct Whole {
  int64_t rows, columns;
  Doubles values;
  Whole(const char* name, int64_t rows_, int64_t columns_, DType dtype, double size = 1)
      : rows(rows_), columns(columns_) {
    for (int64_t i = 0; i < rows * columns; ++i) {
      values.push_back(rounded(dtype, float(size) * normal(5, stream_of(name), uint64_t(i))));
    }
  }
  double at(int64_t row, int64_t column) const { return values[size_t(row * columns + column)]; }
};

struct Operands {
  explicit Operands(const CrossAttentionShape& s)
      : x("x", s.batch * s.text, s.hidden, s.dtype),
        visual("visual", s.batch * s.visual, s.features, s.dtype),
        dout("dout", s.batch * s.text, s.hidden, s.dtype),
        q("wq", s.heads * s.head_dim, s.hidden, s.dtype, .5),
        k("wk", s.kv_heads * s.head_dim, s.features, s.dtype, .5),
        v("wv", s.kv_heads * s.head_dim, s.features, s.dtype, .5),
        out("wo", s.hidden, s.heads * s.head_dim, s.dtype, .5) {}
  Whole x, visual, dout, q, k, v, out;
  float gate = .7f;
};

/// a [rows, inner] x b [columns, inner]^T.
Doubles product(const Doubles& a, const Doubles& b, int64_t rows, int64_t columns, int64_t inner) {
  Doubles out(size_t(rows * columns), 0);
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t j = 0; j < columns; ++j) {
      double& sum = out[size_t(i * columns + j)];
      for (int64_t l = 0; l < inner; ++l)
        sum += a[size_t(i * inner + l)] * b[size_t(j * inner + l)];
    }
  }
  return out;
}
Doubles transposed(const Doubles& a, int64_t rows, int64_t columns) {
  Doubles out(a.size());
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t j = 0; j < columns; ++j) out[size_t(j * rows + i)] = a[size_t(i * columns + j)];
  }
  return out;
}

/// Results of one process, in double, by name.
std::map<std::string, Doubles> reference(const CrossAttentionShape& s, const Operands& o) {
  const int64_t qc = s.heads * s.head_dim, kc = s.kv_heads * s.head_dim;
  const int64_t rows = s.batch * s.text, keys = s.batch * s.visual;
  const double factor = 1 / std::sqrt(double(s.head_dim)),
               tanh = s.gate ? std::tanh(double(o.gate)) : 1;
  const Doubles q = product(o.x.values, o.q.values, rows, qc, s.hidden);
  const Doubles k = product(o.visual.values, o.k.values, keys, kc, s.features);
  const Doubles v = product(o.visual.values, o.v.values, keys, kc, s.features);
  Doubles dprojected = o.dout.values;
  for (double& each : dprojected) each *= tanh;
  const Doubles da =
      product(dprojected, transposed(o.out.values, s.hidden, qc), rows, qc, s.hidden);
  Doubles a(size_t(rows * qc), 0), dq(a.size(), 0), dk(k.size(), 0), dv(v.size(), 0);
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t first = row / s.text * s.visual;
    for (int64_t h = 0; h < s.heads; ++h) {
      const int64_t qa = row * qc + h * s.head_dim, kh = h / (s.heads / s.kv_heads) * s.head_dim;
      Doubles p(size_t(s.visual)), dp(size_t(s.visual), 0);
      double top = -INFINITY, sum = 0, delta = 0;
      for (int64_t j = 0; j < s.visual; ++j) {
        double score = 0;
        for (int64_t d = 0; d < s.head_dim; ++d) {
          score += q[size_t(qa + d)] * k[size_t((first + j) * kc + kh + d)];
        }
        p[size_t(j)] = score * factor;
        top = std::max(top, p[size_t(j)]);
      }
      for (double& each : p) sum += each = std::exp(each - top);
      for (int64_t j = 0; j < s.visual; ++j) {
        p[size_t(j)] /= sum;
        for (int64_t d = 0; d < s.head_dim; ++d) {
          const size_t key = size_t((first + j) * kc + kh + d);
          a[size_t(qa + d)] += p[size_t(j)] * v[key];
          dp[size_t(j)] += da[size_t(qa + d)] * v[key];
          dv[key] += p[size_t(j)] * da[size_t(qa + d)];
        }
        delta += p[size_t(j)] * dp[size_t(j)];
      }
      for (int64_t j = 0; j < s.visual; ++j) {
        const double ds = p[size_t(j)] * (dp[size_t(j)] - delta) * factor;
        for (int64_t d = 0; d < s.head_dim; ++d) {
          const size_t key = size_t((first + j) * kc + kh + d);
          dq[size_t(qa + d)] += ds * k[key];
          dk[key] += ds * q[size_t(qa + d)];
        }
      }
    }
  }
  std::map<std::string, Doubles> of;
  Doubles projected = product(a, o.out.values, rows, s.hidden, qc);
  double dgate = 0;
  for (size_t i = 0; i < projected.size(); ++i) dgate += o.dout.values[i] * projected[i];
  of["dgate"] = {dgate * (1 - tanh * tanh)};
  for (double& each : projected) each *= tanh;
  of["out"] = projected;
  // Sums of the terms' magnitudes bound what other orders of addition may differ by.
  const auto magnitudes = [](Doubles values) {
    for (double& each : values) each = std::abs(each);
    return values;
  };
  double& magnitude = of["magnitude"].emplace_back(0);
  const auto weight_gradient = [&](const Doubles& dy, const Doubles& x, int64_t n, int64_t of_n,
                                   int64_t columns) {
    const Doubles left = transposed(dy, n, of_n), right = transposed(x, n, columns);
    for (const double sum : product(magnitudes(left), magnitudes(right), of_n, columns, n)) {
      magnitude = std::max(magnitude, sum);
    }
    return product(left, right, of_n, columns, n);
  };
  of["dx"] = product(dq, transposed(o.q.values, qc, s.hidden), rows, s.hidden, qc);
  of["dvisual"] = product(dk, transposed(o.k.values, kc, s.features), keys, s.features, kc);
  const Doubles by_v = product(dv, transposed(o.v.values, kc, s.features), keys, s.features, kc);
  for (size_t i = 0; i < by_v.size(); ++i) of["dvisual"][i] += by_v[i];
  of["dwq"] = weight_gradient(dq, o.x.values, rows, qc, s.hidden);
  of["dwk"] = weight_gradient(dk, o.visual.values, keys, kc, s.features);
  of["dwv"] = weight_gradient(dv, o.visual.values, keys, kc, s.features);
  of["dwo"] = weight_gradient(dprojected, a, rows, s.hidden, qc);
  return of;
}

/// Tensors of one rank.
class Local {
 public:
  Local(Communicator& comm, const CrossAttentionShape& s, const Operands& o)
      : shape(s), comm_(comm) {
    x = rows_of(o.x, s.text), visual = rows_of(o.visual, s.visual), dout = rows_of(o.dout, s.text);
    weights = {rows_of(o.q), rows_of(o.k), rows_of(o.v), rows_of(o.out)};
    out = like(x, s.dtype), dx = like(x, s.dtype), dvisual = like(visual, s.dtype);
    const DType f32 = DType::f32;
    gradients = {like(weights.q, f32), like(weights.k, f32), like(weights.v, f32),
                 like(weights.out, f32)};
    if (!s.gate) return;
    weights.gate = make(f32, 1, 1), gradients.gate = make(f32, 1, 1);
    weights.gate = Tensor(weights.gate.data(), f32, {1});
    gradients.gate = Tensor(gradients.gate.data(), f32, {1});
    *weights.gate.as<float>() = o.gate;
  }

  void run(CrossAttention& layer, CrossAttentionBatch& batch) {
    layer.forward(x, visual, weights, out, batch);
    layer.backward(batch, dout, x, visual, weights, dx, dvisual, gradients);
  }
  /// Sums the weights' gradients over ranks.
  void sum_gradients() {
    for (const Tensor* each : {&gradients.q, &gradients.k, &gradients.v, &gradients.out}) {
      all_reduce(comm_, *each);
    }
    if (shape.gate) all_reduce(comm_, gradients.gate);
  }

  CrossAttentionShape shape;
  Tensor x, visual, dout, out, dx, dvisual;
  CrossAttentionWeights weights, gradients;

 private:
  Tensor make(DType dtype, int64_t rows, int64_t columns) {
    memory_.emplace_back(size_t(rows * columns) * size_of(dtype));
    return memory_.back().view(dtype, {rows, columns});
  }
  Tensor like(const Tensor& other, DType dtype) { return make(dtype, other.dim(0), other.dim(1)); }
  /// This rank's rows of each sequence of `positions`; 0: all rows.
  Tensor rows_of(const Whole& whole, int64_t positions = 0) {
    const int64_t sequences = positions == 0 ? 1 : shape.batch;
    const Shard shard =
        positions == 0 ? Shard{0, whole.rows} : shard_of(positions, comm_.size(), comm_.rank());
    const Tensor tensor = make(shape.dtype, sequences * shard.count, whole.columns);
    for (int64_t row = 0; row < tensor.dim(0); ++row) {
      const int64_t from = row / shard.count * positions + shard.begin + row % shard.count;
      for (int64_t c = 0; c < whole.columns; ++c) {
        const float value = float(whole.at(from, c));
        if (shape.dtype == DType::f32) {
          tensor.as<float>()[row * whole.columns + c] = value;
        } else {
          tensor.as<BFloat16>()[row * whole.columns + c] = BFloat16::from_float(value);
        }
      }
    }
    return tensor;
  }

  Communicator& comm_;
  std::vector<Memory> memory_;
};

/// Max difference between this rank's rows and one process's, relative to the largest value of
/// all; of gradients, to the largest sum of magnitudes.
class Comparison {
 public:
  explicit Comparison(std::map<std::string, Doubles> expected) : expected_(std::move(expected)) {}
  /// `positions` of each sequence are divided among ranks; 0: the tensor is whole.
  void add(const std::string& name, const Tensor& local, int64_t positions,
           const Communicator& comm) {
    const Shard shard =
        positions == 0 ? Shard{0, local.dim(0)} : shard_of(positions, comm.size(), comm.rank());
    const std::scoped_lock lock(mutex_);
    for (int64_t row = 0; row < local.dim(0); ++row) {
      const int64_t at = row / shard.count * positions + shard.begin + row % shard.count;
      for (int64_t c = 0; c < local.dim(1); ++c) {
        const double want = expected_.at(name)[size_t(at * local.dim(1) + c)];
        const double got = element(local, row, c);
        worst_[name] = std::max(worst_[name], std::isnan(got) ? INFINITY : std::abs(got - want));
        ++compared_[name];
      }
    }
  }
  void expect_below(double bound) const {
    const double gradients = expected_.at("magnitude")[0];
    for (const char* name : {"out", "dx", "dvisual", "dwq", "dwk", "dwv", "dwo"}) {
      EXPECT_TRUE(compared_.contains(name)) << name;
    }
    for (const auto& [name, worst] : worst_) {
      const double size = name[0] == 'd' ? gradients : largest(expected_.at(name));
      EXPECT_LE(worst, bound * size) << name;
      EXPECT_EQ(compared_.at(name) % expected_.at(name).size(), 0u) << name;
    }
  }

 private:
  static double largest(const Doubles& values) {
    double size = 0;
    for (const double each : values) size = std::max(size, std::abs(each));
    return size;
  }
  std::mutex mutex_;
  std::map<std::string, Doubles> expected_;
  std::map<std::string, double> worst_;
  std::map<std::string, size_t> compared_;
};

/// Tensors of a rank's passes by name, and the positions that are divided among ranks; 0: none.
std::vector<std::tuple<std::string, Tensor, int64_t>> results(const Local& local) {
  const CrossAttentionShape& s = local.shape;
  std::vector<std::tuple<std::string, Tensor, int64_t>> all{
      {"out", local.out, s.text},           {"dx", local.dx, s.text},
      {"dvisual", local.dvisual, s.visual}, {"dwq", local.gradients.q, 0},
      {"dwk", local.gradients.k, 0},        {"dwv", local.gradients.v, 0},
      {"dwo", local.gradients.out, 0}};
  if (s.gate) all.emplace_back("dgate", Tensor(local.gradients.gate.data(), DType::f32, {1, 1}), 0);
  return all;
}

/// Results of a world of one rank.
std::map<std::string, Doubles> on_one_rank(const CrossAttentionShape& s, const Operands& operands) {
  std::map<std::string, Doubles> of;
  run_threads({.ranks = 1}, [&](Communicator& comm) {
    Local local(comm, s, operands);
    CrossAttention layer(comm, s);
    CrossAttentionBatch batch;
    local.run(layer, batch);
    for (const auto& [name, tensor, positions] : results(local)) {
      for (int64_t row = 0; row < tensor.dim(0); ++row) {
        for (int64_t c = 0; c < tensor.dim(1); ++c) of[name].push_back(element(tensor, row, c));
      }
    }
  });
  return of;
}

void compare_with_one_process(const Case& c, double bound) {
  SCOPED_TRACE(c.describe());
  const CrossAttentionShape& s = c.shape;
  const Operands operands(s);
  std::map<std::string, Doubles> expected = reference(s, operands);
  std::map<std::string, Doubles> single = on_one_rank(s, operands);
  single["magnitude"] = expected["magnitude"];
  Comparison exact(std::move(expected)), one_rank(std::move(single));
  run_threads({.ranks = c.ranks}, [&](Communicator& comm) {
    for (const char* form : {"queries", "ring", "gather"}) {
      Local local(comm, s, operands);
      CrossAttention layer(comm, s, {.form = form});
      CrossAttentionBatch batch;
      const uint64_t before = comm.bytes_sent();
      local.run(layer, batch);
      EXPECT_EQ(comm.bytes_sent() - before,
                uint64_t(layer.forward_bytes() + layer.backward_bytes()));
      local.sum_gradients();
      for (const auto& [name, tensor, positions] : results(local)) {
        exact.add(name, tensor, positions, comm);
        one_rank.add(name, tensor, positions, comm);
      }
    }
  });
  exact.expect_below(bound);
  one_rank.expect_below(bound);
}

TEST(CrossAttention, MatchesOneProcess) {
  for (const Case& c : generate(32, DType::f32)) compare_with_one_process(c, 1e-6);
}

TEST(CrossAttention, MatchesOneProcessInBf16) {
  for (const Case& c : generate(12, DType::bf16)) compare_with_one_process(c, 3e-2);
}

TEST(CrossAttention, BatchHoldsNoKeys) {
  run_threads({.ranks = 2}, [](Communicator& comm) {
    size_t bytes[2];
    for (const int64_t visual : {8, 800}) {
      const CrossAttentionShape s{
          .text = 6, .visual = visual, .hidden = 4, .features = 3, .head_dim = 4};
      Local local(comm, s, Operands(s));
      CrossAttention layer(comm, s);
      CrossAttentionBatch batch;
      local.run(layer, batch);
      bytes[visual == 8 ? 0 : 1] = batch.bytes();
    }
    EXPECT_EQ(bytes[0], bytes[1]);
    EXPECT_GT(bytes[0], 0u);
  });
}

TEST(CrossAttention, FrozenFeaturesNeedNoGradient) {
  run_threads({.ranks = 2}, [](Communicator& comm) {
    const CrossAttentionShape s{.text = 5, .visual = 9, .hidden = 4, .features = 3, .head_dim = 2};
    const Operands operands(s);
    Local with(comm, s, operands), without(comm, s, operands);
    CrossAttention layer(comm, s);
    CrossAttentionBatch batch;
    with.run(layer, batch);
    without.dvisual = {};
    without.run(layer, batch);
    for (int64_t i = 0; i < with.dx.elements(); ++i) {
      EXPECT_EQ(with.dx.as<float>()[i], without.dx.as<float>()[i]);
    }
  });
}

TEST(CrossAttention, RefusesBadInputByOneLine) {
  using testing::HasSubstr;
  const CrossAttentionShape good{
      .text = 4, .visual = 4, .hidden = 4, .features = 4, .head_dim = 2, .gate = true};
  run_threads({.ranks = 2}, [&](Communicator& comm) {
    const auto differs = [&](auto change) {
      CrossAttentionShape s = good;
      if (comm.rank() == 1) change(s);
      return error_of<Mismatch>([&] { CrossAttention(comm, s, {}); });
    };
    EXPECT_THAT(differs([](auto& s) { s.hidden = 5; }),
                testing::AllOf(HasSubstr("rank 1"), HasSubstr("hidden 5"), HasSubstr("hidden 4")));
    EXPECT_THAT(differs([](auto& s) { s.visual = 0; }),
                testing::AllOf(HasSubstr("rank 1"), HasSubstr("visual 0: expected 1 to 2^30")));
    EXPECT_THAT(differs([](auto& s) { s.gate = false; }), HasSubstr("gate"));
    EXPECT_THAT(differs([](auto& s) { s.heads = 3, s.kv_heads = 2; }), HasSubstr("heads 3"));
  });
  run_threads({.ranks = 1}, [&](Communicator& comm) {
    Local local(comm, good, Operands(good));
    CrossAttention layer(comm, good);
    CrossAttentionBatch batch;
    const auto refusal = [&] {
      return error_of<InvalidArgument>([&] { local.run(layer, batch); });
    };
    EXPECT_EQ(error_of<InvalidArgument>([&] {
                layer.backward(batch, local.dout, local.x, local.visual, local.weights, local.dx,
                               local.dvisual, local.gradients);
              }),
              "cross_attention: batch: expected one that a forward pass of this layer has filled");
    EXPECT_EQ(refusal(), "");
    std::swap(local.weights.gate, local.gradients.q);
    EXPECT_THAT(refusal(), HasSubstr("cross_attention: weights.gate"));
    std::swap(local.weights.gate, local.gradients.q);
    std::swap(local.dx, local.x);
    local.dx = local.out;
    local.out = local.x;
    EXPECT_THAT(refusal(), HasSubstr("cross_attention: out"));
  });
}

}  // namespace
}  // namespace tandem::test
