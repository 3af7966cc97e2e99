// Recomputed activations: losses, gradients and expert counts have the bits of saved ones, in less
// memory.
#include "engine/model/recompute.h"

#include <gtest/gtest.h>

#include <optional>
#include <string>
#include <vector>

#include "engine/model/expert_load.h"
#include "tandem/error.h"
#include "tests/engine/model/harness.h"
#include "tests/flat.h"

namespace tandem {
namespace {
using namespace tandem::test;

constexpr int kBatches = 4;
constexpr RecomputedLayers kModes[] = {{Recompute::selective},
                                       {Recompute::full},
                                       {Recompute::selective, 1},
                                       {Recompute::full, 1},
                                       {Recompute::full, 3}};

std::string describe(const RecomputedLayers& layers) {
  return std::string(layers.mode == Recompute::full ? "full" : "selective") + ", layers " +
         std::to_string(layers.layers);
}

struct Case {
  const char* name;
  ModelConfig config;
  int ranks = 1, experts = 1;  ///< ranks of a communicator, all of which share the experts if 2
  DType dtype = DType::f32;
  const char* codec = "none";
};

ModelConfig dense_model(int variant) {
  ModelConfig config = small_model(kVariants[variant]);
  config.layers = 4;
  return config;
}
ModelConfig qk_norm_model() {
  ModelConfig config = dense_model(4);
  config.qk_norm = true;
  return config;
}
ModelConfig biased_model() {
  ModelConfig config = qk_norm_model();
  config.qkv_bias = config.out_bias = config.mlp_bias = config.rope_interleaved = true;
  config.attention_sinks = true;
  config.attention_softcap = 3, config.logits_softcap = 2;
  config.mlp_activation = "gelu_pytorch_tanh";
  config.no_rope_layer_interval = 2;
  config.embedding_multiplier = 4, config.residual_multiplier = 0.5, config.logits_scaling = 2;
  return config;
}
ModelConfig sum_norm_model(const char* position) {
  ModelConfig config = qk_norm_model();
  config.norm_position = position;
  config.qk_norm_all_heads = config.norm_position == "post";
  return config;
}
ModelConfig expert_model(bool shared_expert, int64_t freq) {
  ModelConfig config = dense_model(1);
  config.experts = 4;
  config.expert_ffn = 16;
  config.shared_ffn = shared_expert ? 8 : 0;
  config.moe_layer_freq = freq;
  config.aux_loss_coeff = 0.5;
  return config;
}

ModelConfig gated_expert_model() {
  ModelConfig config = expert_model(true, 1);
  config.shared_expert_gate = true;
  return config;
}

ModelConfig biased_expert_model() {
  ModelConfig config = expert_model(false, 1);
  config.router_logit_bias = config.expert_bias = true;
  config.swiglu_limit = 0.1;
  return config;
}

std::vector<Case> cases() {
  return {{"tied", dense_model(0)},
          {"parallel_block", dense_model(2), 2},
          {"windowed_bf16", dense_model(4), 2, 1, DType::bf16},
          {"qk_norm", qk_norm_model(), 2},
          {"biases_and_factors", biased_model(), 2},
          {"biases_and_factors_bf16", biased_model(), 2, 1, DType::bf16},
          {"norms_after", sum_norm_model("post"), 2},
          {"norms_after_bf16", sum_norm_model("post"), 2, 1, DType::bf16},
          {"norms_before_and_after", sum_norm_model("both"), 2},
          {"gated_shared_expert_bf16", gated_expert_model(), 2, 1, DType::bf16},
          {"experts", expert_model(false, 2)},
          {"biased_experts_bf16", biased_expert_model(), 2, 2, DType::bf16},
          {"shared_expert_bf16", expert_model(true, 1), 2, 1, DType::bf16},
          {"expert_parallel", expert_model(true, 2), 2, 2},
          {"wires", dense_model(1), 2, 1, DType::f32, "attention=int8:g16,mlp=int4:g16"},
          {"expert_wires", expert_model(true, 2), 2, 2, DType::f32, "experts=int8:g16"}};
}

struct Outcome {
  double loss = 0, aux_loss = 0;
  std::vector<float> gradients;
  std::vector<double> expert_rows;
  int routed = 0;  ///< calls of TransformerOptions::routed
  bool operator==(const Outcome&) const = default;
};

enum class Passes : uint8_t { whole, split };

/// A step of four batches with three microbatches in flight. The first one's memory is used again
/// while split backward passes of others are pending.
Outcome run(Communicator& all, Communicator& tp, const Case& c, const RecomputedLayers& recompute,
            Passes passes) {
  set_kernel_threads(1);
  Outcome outcome;
  TransformerOptions options{.batch = 2, .seq = 8, .dtype = c.dtype, .recompute = recompute};
  options.overlap.strategy = Strategy::serial;
  options.codec = CodecPolicy::parse(c.codec);
  options.routed = [&](int, const Tensor&, const Tensor&) { ++outcome.routed; };
  if (c.experts > 1) options.experts = &all;
  Transformer model(tp, c.config, options);
  model.initialize(5);
  for (float& w : floats(model.parameters())) w = w == 1 ? w : w * 5;
  model.parameters_changed();
  model.begin_step(kBatches);
  std::vector<Microbatch> microbatches;
  for (int i = 0; i + 1 < kBatches; ++i) microbatches.push_back(model.make_microbatch());
  const auto forward = [&](int i, Microbatch& m) {
    const Batch batch = make_batch(c.config, 16, uint64_t(10 * i + all.rank() / tp.size()));
    outcome.loss += model.forward(batch.tokens, batch.targets, m);
  };
  Microbatch &first = microbatches[0], &second = microbatches[1], &third = microbatches[2];
  forward(0, first), forward(1, second), forward(2, third);
  if (passes == Passes::whole) {
    for (Microbatch& each : microbatches) model.backward(each, 0.1f);
    forward(3, first);
    model.backward(first, 0.1f);
  } else {
    model.backward_input(first, 0.1f), model.backward_input(second, 0.1f);
    model.backward_weight(first);
    model.backward_input(third, 0.1f);
    forward(3, first);
    model.backward_weight(second), model.backward_weight(third);
    model.backward_input(first, 0.1f), model.backward_weight(first);
  }
  model.share_load();
  if (const auto counts = model.expert_counts()) outcome.expert_rows = counts->rows;
  outcome.aux_loss = model.aux_loss();
  const auto gradients = floats(model.gradients());
  outcome.gradients.assign(gradients.begin(), gradients.end());
  return outcome;
}

class RecomputeTest : public ::testing::TestWithParam<Case> {};
INSTANTIATE_TEST_SUITE_P(Models, RecomputeTest, ::testing::ValuesIn(cases()),
                         [](const auto& test) { return std::string(test.param.name); });

TEST_P(RecomputeTest, HasTheBitsOfSavedActivations) {
  if (launched_by_mpi()) GTEST_SKIP() << "threads";
  const Case& c = GetParam();
  WorldOptions world;
  world.ranks = c.ranks;
  run_threads(world, [&](Communicator& comm) {
    const std::unique_ptr<Communicator> alone = comm.split(comm.rank(), 0);
    Communicator& tp = c.experts > 1 ? *alone : comm;
    const Outcome expected = run(comm, tp, c, {}, Passes::whole);
    EXPECT_NE(expected.loss, 0);
    for (const RecomputedLayers& layers : kModes) {
      for (const Passes passes : {Passes::whole, Passes::split}) {
        const Outcome found = run(comm, tp, c, layers, passes);
        SCOPED_TRACE(describe(layers) + (passes == Passes::split ? ", split" : ""));
        EXPECT_EQ(found.loss, expected.loss);
        EXPECT_EQ(found.aux_loss, expected.aux_loss);
        EXPECT_EQ(found.expert_rows, expected.expert_rows);
        EXPECT_EQ(found.routed, expected.routed);
        EXPECT_TRUE(found.gradients == expected.gradients);
      }
    }
  });
}

}  // namespace
}  // namespace tandem
