// Transformers with experts: gradients compared with central differences, and every TP x EP x DP
// layout with one process.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <mutex>

#include "engine/model/expert_load.h"
#include "engine/parallel/dims.h"
#include "tandem/error.h"
#include "tests/engine/model/harness.h"
#include "tests/flat.h"

namespace tandem {
namespace {
using namespace tandem::test;

ModelConfig moe_model() {
  ModelConfig c = small_model();
  c.experts = 8;
  c.top_k = 2;
  c.expert_ffn = 16;
  c.aux_loss_coeff = 0.05;
  return c;
}

struct MoeVariant {
  const char* name;
  void (*change)(ModelConfig&);
};
const MoeVariant kMoeVariants[] = {{"mixtral", [](ModelConfig&) {}},
                                   {"shared_alternating",
                                    [](ModelConfig& c) {
                                      c.shared_ffn = 24;
                                      c.moe_layer_freq = 2;
                                    }},
                                   {"sigmoid_bias",
                                    [](ModelConfig& c) {
                                      c.router = "sigmoid";
                                      c.aux_loss_coeff = 0;
                                      c.router_bias_update_rate = 0.01;
                                      c.route_scale = 2;
                                    }},
                                   {"not_normalized_top_1",
                                    [](ModelConfig& c) {
                                      c.normalize_top_k = false;
                                      c.top_k = 1;
                                      c.shared_ffn = 8;
                                    }},
                                   {"gated_shared",
                                    [](ModelConfig& c) {
                                      c.shared_ffn = 24;
                                      c.shared_expert_gate = true;
                                      c.qkv_bias = true;
                                    }},
                                   {"clamped_biases",
                                    [](ModelConfig& c) {
                                      c.router_logit_bias = c.expert_bias = true;
                                      c.fused_experts = true;
                                      c.swiglu_limit = 0.6;
                                    }},
                                   {"biases_shared", [](ModelConfig& c) {
                                      c.router_logit_bias = c.expert_bias = true;
                                      c.shared_ffn = 8;
                                      c.moe_layer_freq = 2;
                                    }}};

/// Gives biases of experts and routers, which are 0 at first, values that do not depend on the
/// layout.
void set_biases(Transformer& model) {
  for (const Parameter& p : model.parameter_list()) {
    const bool is_bias = p.name.ends_with("bias") && !p.name.ends_with("correction_bias");
    if (!is_bias || p.name.find("self_attn") != p.name.npos) continue;
    const LocalShard shard = local_shard(p);
    for (int64_t i = 0; i < shard.rows * shard.columns; ++i) {
      floats(model.parameters())[size_t(p.offset + i)] =
          normal(3, stream_of(p.name.c_str()), uint64_t(shard.first + i)) / 5;
    }
  }
}

ModelConfig config_of(const MoeVariant& variant) {
  ModelConfig c = moe_model();
  variant.change(c);
  return c;
}

class MoeModel : public ::testing::TestWithParam<MoeVariant> {};
INSTANTIATE_TEST_SUITE_P(Variants, MoeModel, ::testing::ValuesIn(kMoeVariants),
                         [](const auto& test) { return std::string(test.param.name); });

/// Function whose gradient backward computes.
double objective(Transformer& model, const ModelConfig& c, const Batch& batch) {
  const double cross_entropy = model.forward(batch.tokens, batch.targets);
  return cross_entropy + (c.aux_loss_coeff > 0 ? model.aux_loss() : 0);
}

TEST_P(MoeModel, GradientsAgreeWithCentralDifferences) {
  if (launched_by_mpi()) GTEST_SKIP() << "one rank is enough";
  ModelConfig config = config_of(GetParam());
  config.aux_loss_coeff *= 100;  // or the cross-entropy, summed over tokens, would hide it
  config.swiglu_limit *= 100;    // no element is at a limit, where differences have no limit
  run_threads({}, [&](Communicator& comm) {
    set_kernel_threads(1);
    Transformer model(comm, config, {.batch = 2, .seq = 11});
    model.initialize(5);
    for (float& w : floats(model.parameters())) w = w == 1 ? w : w * 5;
    set_biases(model);
    const Batch batch = make_batch(config, 22);
    const auto counts = [&] { return model.expert_counts()->rows; };
    model.forward(batch.tokens, batch.targets);
    const auto chosen = counts();
    model.backward(1);
    int compared = 0, flipped = 0;
    for (const Parameter& p : model.parameter_list()) {
      if (p.name.ends_with("correction_bias")) continue;  // no gradient
      const int64_t columns = p.shape.back(), rows = p.shape.size() == 1 ? 1 : p.shape[0];
      for (int sample = 0; sample < 6; ++sample) {
        const auto words = philox(9, stream_of(p.name.c_str()), uint64_t(sample));
        const int64_t row = int64_t(words[0]) % rows, column = int64_t(words[1]) % columns;
        const size_t at = size_t(p.offset + row * p.row_stride + column);
        const float saved = floats(model.parameters())[at], step = 4e-3f;
        floats(model.parameters())[at] = saved + step;
        const double above = objective(model, config, batch);
        bool same = counts() == chosen;
        floats(model.parameters())[at] = saved - step;
        const double below = objective(model, config, batch);
        same = same && counts() == chosen;
        floats(model.parameters())[at] = saved;
        const double numeric = (above - below) / (2.0 * double(step));
        if (!same) {  // another expert choice is another function
          ++flipped;
          continue;
        }
        ++compared;
        const double got = double(floats(model.gradients())[at]);
        EXPECT_NEAR(got, numeric, 6e-3 * std::fabs(numeric) + 4e-3) << p.name;
      }
    }
    EXPECT_GT(compared, 4 * flipped);
  });
}

struct Layout {
  int tp, ep, dp;
};

using Sums = std::map<std::string, std::vector<double>>;
struct WholeStep {
  double loss = 0;
  Sums gradients;
  std::vector<double> counts;
};

/// Adds this rank's shard of a step of `layout` to `all`.
void add_step(Communicator& world, const Layout& layout, const ModelConfig& config, int64_t batch,
              std::mutex& mutex, WholeStep& all) {
  set_kernel_threads(1);
  const ParallelGroups groups(world, {layout.tp, layout.dp, layout.ep}, true);
  const int64_t seq = 16, share = groups.dims().local_batch(batch);
  const int replica = groups.copies().rank();
  Transformer model(
      groups.tp(), config,
      {.batch = share, .seq = seq, .experts = groups.experts(), .step = groups.world_axes()});
  model.initialize(17);
  set_biases(model);
  const Batch whole = make_batch(config, batch * seq);
  const auto slice = [&](const std::vector<int32_t>& values) {
    return std::span(values).subspan(size_t(replica * share * seq), size_t(share * seq));
  };
  const double loss = model.forward(slice(whole.tokens), slice(whole.targets));
  model.backward(1.0f / float(batch * seq));
  model.share_load();
  const std::lock_guard lock(mutex);
  if (groups.tp().rank() == 0) all.loss += loss;
  if (world.rank() == 0) all.counts = model.expert_counts()->rows;
  for (const Parameter& p : model.parameter_list()) {
    int64_t elements = 1;
    for (const int64_t d : p.shape) elements *= d;
    auto& sums = all.gradients[p.name];
    sums.resize(size_t(elements));
    if (!p.sharding.over_tp() && groups.tp().rank() > 0) continue;
    const LocalShard shard = local_shard(p);
    for (int64_t i = 0; i < shard.rows; ++i) {
      for (int64_t j = 0; j < shard.columns; ++j) {
        sums[size_t(shard.first + i * shard.whole_columns + j)] +=
            double(floats(model.gradients())[size_t(p.offset + i * shard.row_stride + j)]);
      }
    }
  }
}

WholeStep run_layout(const Layout& layout, const ModelConfig& config) {
  WholeStep all;
  std::mutex mutex;
  WorldOptions world;
  world.ranks = layout.tp * layout.dp;
  run_threads(world, [&](Communicator& comm) { add_step(comm, layout, config, 8, mutex, all); });
  return all;
}

double relative(const std::vector<double>& got, const std::vector<double>& want) {
  double squares = 0, size = 1e-60;
  for (size_t i = 0; i < want.size(); ++i) {
    squares += (got[i] - want[i]) * (got[i] - want[i]);
    size += want[i] * want[i];
  }
  return std::sqrt(squares / size);
}

TEST_P(MoeModel, EveryLayoutMatchesTheLossAndGradientsOfOneProcess) {
  if (launched_by_mpi()) GTEST_SKIP() << "threads";
  const ModelConfig config = config_of(GetParam());
  const WholeStep one = run_layout({1, 1, 1}, config);
  for (const Layout& layout : {Layout{1, 2, 2},
                               {1, 4, 4},
                               {2, 1, 1},
                               {2, 2, 2},
                               {1, 2, 4},
                               {4, 1, 1},
                               {2, 2, 4},
                               {1, 8, 8},
                               {1, 1, 2}}) {
    // Eight threads on few processors take long: one variant shows them.
    if (layout.tp * layout.dp == 8 && std::string_view(GetParam().name) != "mixtral") continue;
    const WholeStep many = run_layout(layout, config);
    const std::string name = "tp " + std::to_string(layout.tp) + " ep " +
                             std::to_string(layout.ep) + " dp " + std::to_string(layout.dp);
    EXPECT_NEAR(many.loss, one.loss, 1e-6 * one.loss) << name;
    EXPECT_EQ(many.counts, one.counts) << name << ": choices flipped";
    for (const auto& [tensor, want] : one.gradients) {
      EXPECT_LE(relative(many.gradients.at(tensor), want), 1e-6) << name << ", " << tensor;
    }
  }
}

TEST(MoeModel, EveryRunHasTheSameBits) {
  if (launched_by_mpi()) GTEST_SKIP() << "threads";
  const ModelConfig config = config_of(kMoeVariants[1]);
  const Step one = run_on_threads(4, config, {.batch = 3, .seq = 7});
  const Step two = run_on_threads(4, config, {.batch = 3, .seq = 7});
  EXPECT_EQ(one.loss, two.loss);
  EXPECT_EQ(one.gradients, two.gradients);
}

TEST(MoeModel, Bf16StaysCloseToF32) {
  if (launched_by_mpi()) GTEST_SKIP() << "threads";
  const ModelConfig config = moe_model();
  TransformerOptions options{.batch = 3, .seq = 7};
  const Step f32 = run_on_threads(1, config, options);
  options.dtype = DType::bf16;
  const Step bf16 = run_on_threads(2, config, options);
  EXPECT_NEAR(bf16.loss, f32.loss, 0.02 * f32.loss);
}

// An auxiliary loss a microbatch: their mean, so that each counts with its share.
TEST(MoeModel, AuxiliaryLossOfAStepIsTheMeanOfItsMicrobatches) {
  if (launched_by_mpi()) GTEST_SKIP() << "threads";
  ModelConfig config = moe_model();
  config.aux_loss_coeff = 0.5;
  for (const int ranks : {1, 2}) {
    WorldOptions world;
    world.ranks = ranks;
    run_threads(world, [&](Communicator& comm) {
      const TransformerOptions options{.batch = 2, .seq = 9};
      const Batch batches[] = {make_batch(config, 18, 1), make_batch(config, 18, 2)};
      const auto pass = [](Transformer& model, const Batch& batch) {
        model.forward(batch.tokens, batch.targets);
        model.backward(0.1f);
      };
      Transformer together(comm, config, options);
      together.initialize(5);
      together.begin_step(2);
      for (const Batch& batch : batches) pass(together, batch);
      together.share_load();

      ModelConfig half = config;
      half.aux_loss_coeff /= 2;
      Transformer separate(comm, half, options);
      separate.initialize(5);
      double aux_loss = 0;
      std::vector<double> sums, counts(size_t(config.experts));
      for (const Batch& batch : batches) {
        separate.begin_step();
        pass(separate, batch);
        const std::span<float> gradients = floats(separate.gradients());
        sums.resize(gradients.size());
        for (size_t i = 0; i < sums.size(); ++i) sums[i] += double(gradients[i]);
        aux_loss += separate.aux_loss();
        const std::vector<double> added = separate.expert_counts()->of(1);
        for (size_t e = 0; e < counts.size(); ++e) counts[e] += added[e];
      }
      const std::span<float> gradients = floats(together.gradients());
      for (size_t i = 0; i < sums.size(); ++i) {
        ASSERT_NEAR(gradients[i], sums[i], 1e-6 + 1e-5 * std::fabs(sums[i])) << i;
      }
      EXPECT_NEAR(together.aux_loss(), aux_loss, 1e-12);
      EXPECT_EQ(together.expert_counts()->of(1), counts);
    });
  }
}

TEST(MoeModel, BiasMovesTowardsExpertsWithTooFewRows) {
  if (launched_by_mpi()) GTEST_SKIP() << "threads";
  const ModelConfig config = config_of(kMoeVariants[2]);
  run_threads({}, [&](Communicator& comm) {
    Transformer model(comm, config, {.batch = 2, .seq = 11});
    model.initialize(5);
    const Batch batch = make_batch(config, 22);
    model.forward(batch.tokens, batch.targets);
    model.share_load();
    const std::vector<double> counts = model.expert_counts()->of(0);
    model.adjust_router_bias();
    for (const Parameter& p : model.parameter_list()) {
      if (p.name != "model.layers.0.block_sparse_moe.gate.e_score_correction_bias") continue;
      for (size_t e = 0; e < counts.size(); ++e) {
        const float bias = floats(model.parameters())[size_t(p.offset) + e];
        EXPECT_FLOAT_EQ(bias, counts[e] < 5.5 ? 0.01f : -0.01f) << counts[e];
      }
    }
  });
}

TEST(MoeModel, InvalidConfigurationsAreRefusedByName) {
  const auto error_of = [](void (*change)(ModelConfig&), int ep) -> std::string {
    ModelConfig c = moe_model();
    change(c);
    try {
      c.check(1, ep);
    } catch (const ConfigError& error) {
      return error.what();
    }
    return "no error";
  };
  EXPECT_EQ(error_of([](ModelConfig& c) { c.top_k = 9; }, 1),
            "model.top_k = 9: expected 1 to model.experts = 8");
  EXPECT_EQ(error_of([](ModelConfig&) {}, 3),
            "model.experts = 8: expected a multiple of parallel.ep = 3");
  EXPECT_EQ(error_of([](ModelConfig& c) { c.experts = 0; }, 2),
            "model.experts = 0: expected some, for parallel.ep = 2");
  EXPECT_EQ(error_of([](ModelConfig& c) { c.parallel_block = true; }, 1),
            "model.parallel_block = true: expected false where model.experts is above 0");
  EXPECT_EQ(error_of([](ModelConfig& c) { c.experts = 0, c.expert_bias = true; }, 1),
            "model.experts = 0: expected some, for router_logit_bias, expert_bias, fused_experts "
            "or swiglu_limit");
  EXPECT_EQ(error_of([](ModelConfig& c) { c.swiglu_limit = -7; }, 1),
            "model.swiglu_limit = -7, swiglu_alpha = 1.702: expected 0 (SwiGLU) to 1e6, and 1e-6 "
            "to 1e6");
  EXPECT_EQ(error_of([](ModelConfig& c) { c.router = "hash"; }, 1),
            "model.router = hash: expected softmax or sigmoid");
}

TEST(MoeModel, NaNRouterWeightIsReportedOnEveryRank) {
  if (launched_by_mpi()) GTEST_SKIP() << "threads";
  const ModelConfig config = moe_model();
  WorldOptions world;
  world.ranks = 2;
  run_threads(world, [&](Communicator& comm) {
    const auto tp = comm.split(comm.rank(), 0);
    Transformer model(*tp, config, {.batch = 1, .seq = 4, .experts = &comm});
    model.initialize(1);
    for (const Parameter& p : model.parameter_list()) {
      if (comm.rank() == 1 && p.name.ends_with("gate.weight")) {
        floats(model.parameters())[size_t(p.offset)] = NAN;
      }
    }
    const Batch batch = make_batch(config, 4);
    try {
      model.forward(batch.tokens, batch.targets);
      ADD_FAILURE() << "no error";
    } catch (const Mismatch& error) {
      EXPECT_EQ(std::string(error.what()).substr(0, 40),
                "moe: rank 1: row 0 has the weight nan fo");
    }
  });
}

}  // namespace
}  // namespace tandem
