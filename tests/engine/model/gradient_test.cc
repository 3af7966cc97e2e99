#include <gtest/gtest.h>

#include <algorithm>

#include "tandem/error.h"
#include "tests/engine/model/harness.h"
#include "tests/error_of.h"
#include "tests/flat.h"

namespace tandem {
namespace {
using namespace tandem::test;

class Gradient : public ::testing::TestWithParam<Variant> {};
INSTANTIATE_TEST_SUITE_P(Variants, Gradient, ::testing::ValuesIn(kVariants),
                         [](const auto& test) { return std::string(test.param.name); });

/// Gives biases and sinks, which are 0 at first, and norms of heads, which are 1, other values.
void set_vectors(Transformer& model) {
  for (const Parameter& p : model.parameter_list()) {
    const bool is_bias = p.name.ends_with(".bias") || p.name.ends_with(".sinks"),
               is_norm = p.name.find("_norm.w") != p.name.npos;
    if (!is_bias && !is_norm) continue;
    for (int64_t i = 0; i < local_range(p).count; ++i) {
      const float value = normal(3, stream_of(p.name.c_str()), uint64_t(i));
      floats(model.parameters())[size_t(p.offset + i)] = is_bias ? value : 1 + value / 4;
    }
  }
}

/// Central differences along a few elements of every tensor, the loss summed in double.
void compare_with_central_differences(const ModelConfig& config) {
  run_threads({}, [&](Communicator& comm) {
    set_kernel_threads(1);
    Transformer model(comm, config, {.batch = 2, .seq = 11});
    model.initialize(5);
    for (float& w : floats(model.parameters())) w = w == 1 ? w : w * 5;
    set_vectors(model);
    const Batch batch = make_batch(config, 22);
    model.forward(batch.tokens, batch.targets);
    model.backward(1);
    const auto gradients = floats(model.gradients());
    const auto parameters = floats(model.parameters());
    for (const Parameter& p : model.parameter_list()) {
      double worst = 0, size = 0;
      const auto [rows, columns, row_stride, first, whole_columns] = local_shard(p);
      for (int sample = 0; sample < 12; ++sample) {
        const auto words = philox(9, stream_of(p.name.c_str()), uint64_t(sample));
        const int64_t row = int64_t(words[0]) % rows, column = int64_t(words[1]) % columns;
        const size_t at = size_t(p.offset + row * row_stride + column);
        const float saved = parameters[at], step = 4e-3f;
        parameters[at] = saved + step;
        const double above = model.forward(batch.tokens, batch.targets);
        parameters[at] = saved - step;
        const double below = model.forward(batch.tokens, batch.targets);
        parameters[at] = saved;
        const double numeric = (above - below) / (2.0 * double(step));
        worst = std::max(worst, std::fabs(numeric - double(gradients[at])));
        size = std::max(size, std::fabs(numeric));
      }
      EXPECT_GT(size, 1e-4) << p.name;
      EXPECT_LE(worst, 5e-3 * size + 2e-3) << p.name;
    }
  });
}

TEST_P(Gradient, AgreesWithCentralDifferences) {
  if (launched_by_mpi()) GTEST_SKIP() << "one rank is enough";
  compare_with_central_differences(small_model(GetParam()));
}

/// Biases, norms of the heads of q and k, other rotations and factors.
struct QkvVariant {
  const char* name;
  bool parallel_block;
  void (*change)(ModelConfig&);
  const char* tensor;  ///< that it has, in layer 1
};
const QkvVariant kQkvVariants[] = {
    {"bias", false, [](ModelConfig& c) { c.qkv_bias = true; }, "self_attn.k_proj.bias"},
    {"norms", false, [](ModelConfig& c) { c.qk_norm = true; }, "self_attn.q_norm.weight"},
    {"bias_and_norms", true, [](ModelConfig& c) { c.qkv_bias = c.qk_norm = true; },
     "self_attn.q_norm.weight"},
    {"all_biases", false, [](ModelConfig& c) { c.qkv_bias = c.out_bias = c.mlp_bias = true; },
     "self_attn.o_proj.bias"},
    {"all_biases_scaled", true,
     [](ModelConfig& c) {
       c.out_bias = c.mlp_bias = true;
       c.embedding_multiplier = 3, c.residual_multiplier = 0.5;
     },
     "mlp.down_proj.bias"},
    {"rotations", false,
     [](ModelConfig& c) {
       c.no_rope_layer_interval = 2, c.rope_interleaved = c.qk_norm = true;
       c.rotary_dim = 4;
     },
     "self_attn.k_norm.weight"},
    {"sinks", false,
     [](ModelConfig& c) {
       c.attention_sinks = true;
       c.sliding_window = 5;
     },
     "self_attn.sinks"},
    {"sinks_parallel_block", true, [](ModelConfig& c) { c.attention_sinks = c.qk_norm = true; },
     "self_attn.sinks"},
    {"factors", false,
     [](ModelConfig& c) {
       c.embedding_multiplier = 3, c.residual_multiplier = 0.5, c.attention_multiplier = 0.7;
       c.logits_scaling = 0.25;
     },
     "mlp.down_proj.weight"},
};
class QkvGradient : public ::testing::TestWithParam<QkvVariant> {
 protected:
  ModelConfig model() const {
    ModelConfig config = small_model(kVariants[GetParam().parallel_block ? 3 : 1]);
    GetParam().change(config);
    return config;
  }
};
INSTANTIATE_TEST_SUITE_P(Variants, QkvGradient, ::testing::ValuesIn(kQkvVariants),
                         [](const auto& test) { return std::string(test.param.name); });

TEST_P(QkvGradient, AgreesWithCentralDifferences) {
  if (launched_by_mpi()) GTEST_SKIP() << "one rank is enough";
  compare_with_central_differences(model());
}

TEST_P(QkvGradient, IsTheSameOnSeveralRanks) {
  if (launched_by_mpi()) GTEST_SKIP() << "threads";
  ModelConfig config = model();
  config.kv_heads = 4;
  const TransformerOptions options{.batch = 2, .seq = 8};
  const Step one = run_on_threads(1, config, options);
  EXPECT_TRUE(one.gradients.contains(std::string("model.layers.1.") + GetParam().tensor));
  for (const int ranks : {2, 4}) {
    const Step several = run_on_threads(ranks, config, options);
    for (const auto& [tensor, values] : one.gradients) {
      EXPECT_LE(difference({{tensor, several.gradients.at(tensor)}}, {{tensor, values}}), 2e-5)
          << tensor << " on " << ranks << " ranks";
    }
  }
}

TEST(Transformer, BackwardAccumulatesAndReportsRangesFromTheBack) {
  if (launched_by_mpi()) GTEST_SKIP() << "one rank is enough";
  const ModelConfig config = small_model(kVariants[1]);
  run_threads({}, [&](Communicator& comm) {
    Transformer model(comm, config, {.batch = 1, .seq = 9});
    model.initialize(5);
    const Batch batch = make_batch(config, 9);
    model.forward(batch.tokens, batch.targets);
    const std::span<float> gradients = floats(model.gradients());
    std::vector<float> at_report(gradients.size());  // when they were reported final
    auto reported = int64_t(gradients.size());
    int reports = 0;
    model.backward(0.5f, [&](FlatRange range) {
      EXPECT_EQ(range.end(), reported);
      reported = range.begin;
      ++reports;
      std::copy_n(gradients.begin() + range.begin, range.count, at_report.begin() + range.begin);
    });
    EXPECT_EQ(reports, config.layers * (config.parallel_block ? 1 : 2) + 2);
    EXPECT_EQ(reported, 0);
    EXPECT_TRUE(std::ranges::equal(at_report, gradients));

    model.backward(0.5f);
    for (size_t i = 0; i < at_report.size(); ++i) {
      EXPECT_NEAR(gradients[i], 2 * at_report[i], 1e-6 + 1e-5 * std::fabs(at_report[i]));
    }
  });
}

TEST(Transformer, LayersReadTheirWindow) {
  if (launched_by_mpi()) GTEST_SKIP() << "one rank is enough";
  const auto loss = [](int64_t window, int64_t full_attention_freq) {
    ModelConfig config = small_model();
    config.sliding_window = window;
    config.full_attention_freq = full_attention_freq;
    double result = 0;
    run_threads({}, [&](Communicator& comm) {
      Transformer model(comm, config, {.batch = 2, .seq = 11});
      model.initialize(5);
      for (float& w : floats(model.parameters())) w = w == 1 ? w : w * 5;
      const Batch batch = make_batch(config, 22);
      result = model.forward(batch.tokens, batch.targets);
    });
    return result;
  };
  EXPECT_EQ(loss(11, 0), loss(0, 0));
  EXPECT_NE(loss(10, 0), loss(0, 0));
  EXPECT_NE(loss(3, 2), loss(3, 0));
  EXPECT_NE(loss(3, 2), loss(0, 0));
}

TEST(Transformer, ForwardAwaitsEveryRangeOnceBeforeItsUse) {
  if (launched_by_mpi()) GTEST_SKIP() << "one rank is enough";
  for (ModelConfig config : {small_model(kVariants[0]), small_model(kVariants[1])}) {
    for (const int64_t experts : {0, 4}) {
      config.experts = experts;
      run_threads({}, [&](Communicator& comm) {
        Transformer model(comm, config, {.batch = 1, .seq = 9, .dtype = DType::bf16});
        model.initialize(5);
        const Batch batch = make_batch(config, 9);
        const double expected = model.forward(batch.tokens, batch.targets);
        const std::span<float> weights = floats(model.parameters());
        const std::vector<float> values(weights.begin(), weights.end());
        std::ranges::fill(weights, NAN);
        model.parameters_changed();
        std::vector<int> awaited(weights.size());
        model.await_parameters([&](FlatRange range) {
          EXPECT_TRUE(range.end() <= model.experts_begin() || range.begin >= model.experts_begin());
          for (int64_t i = range.begin; i < range.end(); ++i) {
            weights[size_t(i)] = values[size_t(i)];
            ++awaited[size_t(i)];
          }
          model.parameters_changed(range);
        });
        EXPECT_EQ(model.forward(batch.tokens, batch.targets), expected);
        EXPECT_EQ(std::ranges::count(awaited, 1), int64_t(awaited.size()));
        EXPECT_EQ(model.forward(batch.tokens, batch.targets), expected);
      });
    }
  }
}

TEST(Transformer, RefusesBadInputByName) {
  if (launched_by_mpi()) GTEST_SKIP() << "one rank is enough";
  const ModelConfig config = small_model();
  run_threads({}, [&](Communicator& comm) {
    Transformer model(comm, config, {.batch = 1, .seq = 4});
    const std::vector<int32_t> good{0, 36, 2, 3}, high{0, 1, 37, 3}, short_one{1}, low{-2, 0, 0, 0};
    EXPECT_EQ(error_of<InvalidArgument>([&] { model.forward(high, good); }),
              "tokens: 37 at position 2: expected -1 to 36 (vocab 37)");
    EXPECT_EQ(error_of<InvalidArgument>([&] { model.forward(low, good); }),
              "tokens: -2 at position 0: expected -1 to 36 (vocab 37)");
    EXPECT_EQ(error_of<InvalidArgument>([&] { model.forward(good, high); }),
              "targets: 37 at position 2: expected -1 to 36 (vocab 37)");
    EXPECT_EQ(error_of<InvalidArgument>([&] { model.forward(short_one, good); }),
              "tokens: 1 values: expected batch x seq = 4");
    EXPECT_EQ(error_of<InvalidArgument>([&] { model.backward(1); }),
              "backward: expected a forward pass before");
    EXPECT_EQ(
        error_of<InvalidArgument>([&] { Transformer(comm, config, {.batch = 1, .seq = 17}); }),
        "seq 17: expected between 1 and max_seq = 16");
    EXPECT_EQ(error_of<InvalidArgument>([&] {
                Transformer(comm, config, {.dtype = DType::f16});
              }).substr(0, 3),
              "seq");
    EXPECT_EQ(error_of<InvalidArgument>(
                  [&] { Transformer(comm, config, {.seq = 4, .dtype = DType::f16}); }),
              "model dtype f16: expected f32 or bf16");
  });
}

}  // namespace
}  // namespace tandem
