// Logits in bf16 against those of transformers in f32, with a bound that follows from the
// roundings.
//
// A reference in double precision rounds where the engine does. With stochastic rounding, repeated,
// it tells how far logits move as each rounding contributes independently: the deviation of the
// engine's logits must have that size. With rounding to nearest it must be the engine, but for a
// few values that another order of sums rounds to the other side.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "core/host_copy.h"
#include "engine/checkpoint/stored_model.h"
#include "engine/model/pretrained.h"
#include "gemm/gemm.h"
#include "tandem/random.h"
#include "tests/engine/infer/families.h"
#include "tests/engine/infer/fed_text.h"
#include "tests/engine/infer/set_weights.h"

namespace tandem {
namespace {
using namespace tandem::test;

using Row = std::vector<double>;
using Rows = std::vector<Row>;

/// Values that are stored in bf16.
enum class Site : uint8_t { norm, hidden, keys, attention, swiglu, out, none };
constexpr Site kSites[] = {Site::norm,      Site::hidden, Site::keys,
                           Site::attention, Site::swiglu, Site::out};

class Rounding {
 public:
  enum class Mode : uint8_t { exact, nearest, stochastic };
  explicit Rounding(Mode mode, uint64_t seed = 0, Site skipped = Site::none)
      : mode_(mode), seed_(seed), skipped_(skipped) {}

  void apply(Site site, Row& row) {
    if (mode_ == Mode::exact || site == skipped_) return;
    for (double& x : row) x = round(x);
  }

 private:
  double round(double x) {
    if (x == 0) return x;
    const double unit = std::ldexp(1, std::ilogb(x) - 7);  // bf16 has 8 significant bits
    if (mode_ == Mode::nearest) return std::nearbyint(x / unit) * unit;
    const double uniform = double(philox(seed_, 3, count_++)[0]) / 4294967296.0;
    return std::floor(x / unit + uniform) * unit;
  }

  Mode mode_;
  uint64_t seed_, count_ = 0;
  Site skipped_;
};

/// A Llama without scaled positions, from the function of tensor names.
class Reference {
 public:
  Reference(const ModelConfig& config, double eps) : c_(config), eps_(eps) {}

  /// Logits after each token.
  Rows run(const std::vector<int32_t>& tokens, Rounding rounding) {
    Rows logits, keys(size_t(c_.layers * c_.kv_heads)), values = keys;
    for (size_t position = 0; position < tokens.size(); ++position) {
      const Row& embedding = matrix("model.embed_tokens.weight", c_.vocab * c_.hidden);
      const auto row = embedding.begin() + tokens[position] * c_.hidden;
      Row x(row, row + c_.hidden);
      for (int64_t layer = 0; layer < c_.layers; ++layer) {
        const std::string name = fmt::format("model.layers.{}.", layer);
        const Row h = norm(x, name + "input_layernorm.weight", rounding);
        Row q = product(h, name + "self_attn.q_proj.weight", c_.heads * c_.head_dim);
        Row k = product(h, name + "self_attn.k_proj.weight", c_.kv_heads * c_.head_dim);
        Row v = product(h, name + "self_attn.v_proj.weight", c_.kv_heads * c_.head_dim);
        for (Row* each : {&q, &k, &v}) rounding.apply(Site::hidden, *each);
        rotate(q, position), rotate(k, position);
        rounding.apply(Site::keys, k);
        Row attention = attend(layer, q, k, v, keys, values);
        rounding.apply(Site::attention, attention);
        add(x, product(attention, name + "self_attn.o_proj.weight", c_.hidden), rounding);

        const Row h2 = norm(x, name + "post_attention_layernorm.weight", rounding);
        Row gate = product(h2, name + "mlp.gate_proj.weight", c_.ffn);
        Row up = product(h2, name + "mlp.up_proj.weight", c_.ffn);
        for (Row* each : {&gate, &up}) rounding.apply(Site::hidden, *each);
        for (size_t i = 0; i < up.size(); ++i) up[i] *= gate[i] / (1 + std::exp(-gate[i]));
        rounding.apply(Site::swiglu, up);
        add(x, product(up, name + "mlp.down_proj.weight", c_.hidden), rounding);
      }
      const char* head = c_.tie_word_embeddings ? "model.embed_tokens.weight" : "lm_head.weight";
      logits.push_back(product(norm(x, "model.norm.weight", rounding), head, c_.vocab));
    }
    return logits;
  }

 private:
  const Row& matrix(const std::string& name, int64_t elements) {
    Row& values = matrices_[name];
    for (int64_t i = int64_t(values.size()); i < elements; ++i) {
      values.push_back(weight(name, uint64_t(i)));
    }
    return values;
  }
  Row product(const Row& x, const std::string& name, int64_t rows) {
    const Row& w = matrix(name, rows * int64_t(x.size()));
    Row out(static_cast<size_t>(rows));
    for (size_t i = 0; i < out.size(); ++i) {
      for (size_t j = 0; j < x.size(); ++j) out[i] += w[i * x.size() + j] * x[j];
    }
    return out;
  }
  Row norm(const Row& x, const std::string& name, Rounding& rounding) {
    const Row& gains = matrix(name, c_.hidden);
    double squares = 0;
    for (const double value : x) squares += value * value;
    const double scale = 1 / std::sqrt(squares / double(x.size()) + eps_);
    Row out(x.size());
    for (size_t i = 0; i < x.size(); ++i) out[i] = x[i] * scale * gains[i];
    rounding.apply(Site::norm, out);
    return out;
  }
  void add(Row& x, Row sums, Rounding& rounding) {
    rounding.apply(Site::out, sums);
    for (size_t i = 0; i < x.size(); ++i) x[i] += sums[i];
  }
  void rotate(Row& heads, size_t position) {
    const auto half = size_t(c_.head_dim / 2);
    for (size_t begin = 0; begin < heads.size(); begin += 2 * half) {
      for (size_t i = 0; i < half; ++i) {
        const double exponent = double(2 * i) / double(c_.head_dim);
        const double angle = double(position) * std::pow(c_.rope_theta, -exponent);
        double &a = heads[begin + i], &b = heads[begin + half + i];
        const double first = a * std::cos(angle) - b * std::sin(angle);
        b = b * std::cos(angle) + a * std::sin(angle);
        a = first;
      }
    }
  }
  Row attend(int64_t layer, const Row& q, const Row& k, const Row& v, Rows& keys, Rows& values) {
    const auto d = size_t(c_.head_dim);
    const auto append = [&](Rows& cache, const Row& row) {
      for (int64_t head = 0; head < c_.kv_heads; ++head) {
        const auto begin = row.begin() + head * c_.head_dim;
        Row& all = cache[size_t(layer * c_.kv_heads + head)];
        all.insert(all.end(), begin, begin + c_.head_dim);
      }
    };
    append(keys, k), append(values, v);
    Row out(q.size());
    for (int64_t head = 0; head < c_.heads; ++head) {
      const auto cache = size_t(layer * c_.kv_heads + head / (c_.heads / c_.kv_heads));
      const size_t count = keys[cache].size() / d, begin = size_t(head) * d;
      Row scores(count);
      for (size_t i = 0; i < count; ++i) {
        for (size_t j = 0; j < d; ++j) scores[i] += q[begin + j] * keys[cache][i * d + j];
        scores[i] /= std::sqrt(double(d));
      }
      const double max = *std::ranges::max_element(scores);
      double sum = 0;
      for (double& score : scores) sum += score = std::exp(score - max);
      for (size_t i = 0; i < count; ++i) {
        for (size_t j = 0; j < d; ++j) {
          out[begin + j] += scores[i] / sum * values[cache][i * d + j];
        }
      }
    }
    return out;
  }

  const ModelConfig c_;
  const double eps_;
  std::map<std::string, Row> matrices_;
};

/// Standard deviations of logits over random roundings.
Rows deviations(Reference& reference, const std::vector<int32_t>& tokens, const Rows& exact) {
  constexpr int kRepeats = 24;
  Rows squares(exact.size(), Row(exact[0].size()));
  for (uint64_t seed = 1; seed <= kRepeats; ++seed) {
    const Rows logits = reference.run(tokens, Rounding(Rounding::Mode::stochastic, seed));
    for (size_t i = 0; i < exact.size(); ++i) {
      for (size_t j = 0; j < exact[i].size(); ++j) {
        squares[i][j] += std::pow(logits[i][j] - exact[i][j], 2) / kRepeats;
      }
    }
  }
  for (Row& row : squares) {
    for (double& x : row) x = std::sqrt(x);
  }
  return squares;
}

struct Distance {
  double rms = 0, max = 0;  ///< in standard deviations
};

Distance distance(const Rows& a, const Rows& b, const Rows& deviation) {
  Distance d;
  size_t count = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    for (size_t j = 0; j < a[i].size(); ++j, ++count) {
      const double z = std::abs(a[i][j] - b[i][j]) / deviation[i][j];
      d.rms += z * z;
      d.max = std::max(d.max, z);
    }
  }
  d.rms = std::sqrt(d.rms / double(count));
  return d;
}

/// Deviations of rounding to nearest are 1/sqrt(2) of those of stochastic rounding, on average.
bool has_size_of_roundings(const Distance& d) {
  return d.rms > 0.5 && d.rms < 1 && d.max < 6;
}
/// Another order of sums in f32 rounds few values to the other side; a rounding more or less moves
/// logits as far as other roundings would.
bool is_same_computation(const Distance& d) {
  return d.rms < 0.5;
}

std::vector<int32_t> tokens_of(const FamilyCase& test) {
  std::vector<int32_t> tokens = {256, 35,  105, 110, 99,  108, 117, 100, 101, 32,
                                 60,  115, 116, 100, 105, 111, 46,  104, 62,  10};
  for (const auto& token : test.expected["tokens"]) tokens.push_back(token.get<int32_t>());
  return tokens;
}

/// The engine's logits after each token, in bf16.
Rows engine_logits(const StoredModel& stored, const std::vector<int32_t>& tokens, bool in_blocks) {
  Rows all;
  run_threads({}, [&](Communicator& tp) {
    set_kernel_threads(1);
    FedText text(tp, stored.config, {.dtype = DType::bf16});
    read_weights(text, stored.weights);
    for (size_t i = 0; i < tokens.size(); ++i) {
      if (in_blocks) text.reset();
      const auto begin = tokens.begin() + (in_blocks ? 0 : long(i));
      const std::vector<int32_t> some(begin, tokens.begin() + long(i) + 1);
      const std::vector<float> logits = text.feed(some);
      all.emplace_back(logits.begin(), logits.end());
    }
  });
  return all;
}

class RoundingOf : public ::testing::TestWithParam<std::string> {};
INSTANTIATE_TEST_SUITE_P(Models, RoundingOf,
                         ::testing::Values("llama, form 5", "llama_wide_heads, form 5"),
                         [](const auto& test) {
                           return test.param.substr(0, test.param.find(','));
                         });

TEST_P(RoundingOf, LogitsInBf16DeviateAsTheirRoundingsDo) {
  if (launched_by_mpi()) GTEST_SKIP() << "threads";
  const std::string folder = make_scratch_folder("rounding");
  for (const FamilyCase& test : family_cases()) {
    if (test.name != GetParam()) continue;
    write_folder(folder, test.expected["config"], DType::bf16, 1);
    const StoredModel stored = open_model(folder, [](const std::string&) {});
    const std::vector<int32_t> tokens = tokens_of(test);
    const double eps = stored.config.norm_eps;
    Reference reference(stored.config, eps);
    const Rows exact = reference.run(tokens, Rounding(Rounding::Mode::exact));
    const auto& expected = test.expected["last_logits"];
    for (size_t i = 0; i < expected.size(); ++i) {  // of transformers, in f32
      EXPECT_NEAR(exact.back()[8 * i], expected[i].get<double>(), 1e-4);
    }
    const Rows deviation = deviations(reference, tokens, exact);
    const auto nearest = [&](Reference& model, Site skipped) {
      return model.run(tokens, Rounding(Rounding::Mode::nearest, 0, skipped));
    };
    const Rows rounded = nearest(reference, Site::none);
    for (const bool in_blocks : {false, true}) {
      const Rows found = engine_logits(stored, tokens, in_blocks);
      const Distance size = distance(found, exact, deviation);
      EXPECT_TRUE(has_size_of_roundings(size)) << size.rms << ", max " << size.max;
      const Distance rest = distance(found, rounded, deviation);
      EXPECT_TRUE(is_same_computation(rest)) << rest.rms << (in_blocks ? ", blocks" : "");
    }
    // A missing rounding and another epsilon are outside the bounds.
    for (const Site site : kSites) {
      const Distance d = distance(nearest(reference, site), rounded, deviation);
      EXPECT_FALSE(is_same_computation(d)) << "site " << int(site) << ": " << d.rms;
    }
    Reference other(stored.config, eps + 1e-4);
    EXPECT_FALSE(is_same_computation(distance(nearest(other, Site::none), rounded, deviation)));
    Reference wrong(stored.config, eps + 0.05);
    EXPECT_FALSE(has_size_of_roundings(distance(nearest(wrong, Site::none), exact, deviation)));
  }
  std::filesystem::remove_all(folder);
}

}  // namespace
}  // namespace tandem
