// Every layout computes what one rank does: gradients of the first step, and weights after three
// clipped steps. With wire formats it differs by no more than they round.
#include <gtest/gtest.h>

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "engine/check/layout_check.h"
#include "engine/model/codec_policy.h"
#include "engine/parallel/dims.h"
#include "engine/train/model_ranks.h"
#include "generated_layouts.h"

namespace tandem {
namespace {

constexpr int kSteps = 3;
constexpr double kWeightBound = 1e-5;
/// Bound of a gradient in f32, relative to the sum of its samples' magnitudes: gradients of norms
/// are sums of terms that cancel.
constexpr double kSumBound = 1e-6;
/// Share of the largest gradient below which another one is a rounding error.
constexpr double kRounding = 1e-7;
constexpr uint64_t kSeed = 5;
constexpr size_t kShort = 25, kShortOthers = 5, kLong = 500, kLongOthers = 100, kShortContext = 10,
                 kLongContext = 250;

struct Worst {
  double relative = 0;
  std::string tensor, layout;
  void add(const TensorDifference& difference, const TrainConfig& config) {
    if (difference.relative <= relative) return;
    *this = {difference.relative, difference.tensor, describe_layout(config)};
  }
  void print(const char* what) const {
    if (!tensor.empty()) fmt::print("  {:21}  {:.2e}  {}  {}\n", what, relative, tensor, layout);
  }
};

double max_magnitude(const GatheredTensor& tensor) {
  double max = 0;
  for (const float value : tensor.max) max = std::max(max, std::abs(double(value)));
  return max;
}

/// Sum over groups of `size` consecutive samples of the largest gradient that each has in a tensor,
/// or in what `message_of` makes of several.
std::map<std::string, double> sum_magnitudes(const TrainConfig& config, int64_t size,
                                             std::string (*message_of)(const std::string&)) {
  std::map<std::string, double> sums;
  for (int64_t begin = 0; begin < config.train.batch; begin += size) {
    StepHooks hooks;  // the whole batch reads the group's samples
    hooks.samples = [&](const RunConfig&, int, int64_t sample) { return begin + sample % size; };
    const StepsOutcome of_group =
        run_steps({one_rank_config(config), config, 1, hooks}, corpus_of(config));
    std::map<std::string, double> largest;
    for (const auto& [name, gradient] : of_group.gradients) {
      double& max = largest[message_of(name)];
      max = std::max(max, max_magnitude(gradient) * double(size) / double(config.train.batch));
    }
    for (const auto& [message, max] : largest) sums[message] += max;
  }
  return sums;
}

/// Outcomes on one rank, which many layouts share.
class OneRank {
 public:
  struct Outcome {
    StepsOutcome steps;
    std::map<std::string, double> magnitudes;  ///< of a tensor, summed over the samples
  };

  const Outcome& of(const TrainConfig& config) {
    const TrainConfig one = one_rank_config(config);
    const std::string key =
        fmt::format("{}\n{} {}", one.to_toml(), config.parallel.dp, config.train.microbatch);
    const auto found = outcomes_.find(key);
    if (found != outcomes_.end()) return found->second;
    const auto same = [](const std::string& tensor) { return tensor; };
    return outcomes_[key] = {run_steps({one, config, kSteps}, corpus_of(config)),
                             sum_magnitudes(config, 1, same)};
  }

 private:
  std::map<std::string, Outcome> outcomes_;
};

/// Tensors whose gradients are rounding errors in place of 0, as those of queries and keys in
/// sequences of one token. Adam divides them by their own size, so their weights differ, too.
std::set<std::string> rounding_only(const std::map<std::string, double>& magnitudes) {
  double largest = 0;
  for (const auto& [tensor, magnitude] : magnitudes) largest = std::max(largest, magnitude);
  std::set<std::string> tensors;
  for (const auto& [tensor, magnitude] : magnitudes) {
    if (magnitude <= kRounding * largest) tensors.insert(tensor);
  }
  return tensors;
}

void expect_one_rank(std::span<const TrainConfig> layouts) {
  OneRank one_rank;
  Worst gradients, sums, weights;
  for (const TrainConfig& config : layouts) {
    SCOPED_TRACE(describe_layout(config));
    const auto& [expected, magnitudes] = one_rank.of(config);
    const StepsOutcome found = run_steps({config, config, kSteps}, corpus_of(config));
    EXPECT_GT(expected.grad_norm, config.optimizer.grad_clip) << "no step is clipped";
    const std::vector<TensorDifference> differences = compare_steps(found, expected);
    EXPECT_LE(differences.front().relative, layout_bound(config.train))
        << differences.front().tensor;
    gradients.add(differences.front(), config);
    if (config.train.dtype != "f32") continue;
    const std::set<std::string> rounding = rounding_only(magnitudes);
    for (TensorDifference d : differences) {
      if (d.kind != Compared::gradient || rounding.contains(d.tensor)) continue;
      d.relative = std::abs(d.found - d.expected) / magnitudes.at(d.tensor);
      EXPECT_LE(d.relative, kSumBound) << d.tensor;
      sums.add(d, config);
    }
    for (const TensorDifference& weight : compare_tensors(found.weights, expected.weights)) {
      if (rounding.contains(weight.tensor)) continue;
      EXPECT_LE(weight.relative, kWeightBound) << weight.tensor;
      weights.add(weight, config);
    }
  }
  fmt::print("{} layouts\n", layouts.size());
  gradients.print("gradients");
  sums.print("of their samples' sum");
  weights.print("weights");
}

/// Without other axes than that of the tensor-parallel sums. Each replica's microbatches are
/// microbatches of their own: products of other sizes may have other last bits, which can change
/// what a value is rounded to on the wire.
TrainConfig only_tp(const TrainConfig& config) {
  TrainConfig other = one_rank_config(config);
  other.parallel.tp = config.parallel.tp;
  other.train.microbatch = config.train.microbatch;
  return other;
}

/// Wire formats of activations: their error is that of tensor parallelism alone, whatever the other
/// axes.
void expect_tp_with_wires(std::span<const TrainConfig> layouts) {
  Worst gradients;
  for (const TrainConfig& config : layouts) {
    SCOPED_TRACE(describe_layout(config));
    const StepsOutcome expected = run_steps({only_tp(config), config}, tiny_corpus());
    const StepsOutcome found = run_steps({config, config}, tiny_corpus());
    const TensorDifference gradient = compare_steps(found, expected).front();
    EXPECT_LE(gradient.relative, layout_bound(config.train)) << gradient.tensor;
    gradients.add(gradient, config);
  }
  fmt::print("{} layouts\n", layouts.size());
  gradients.print("gradients");
}

/// Elements that may share a group of a gradient's message: weights of one layer, all experts, or
/// one tensor.
std::string message_of(const std::string& tensor) {
  if (tensor.find("experts") != std::string::npos) return "experts";
  const size_t layer = tensor.find("layers.");
  return layer == std::string::npos ? tensor : tensor.substr(0, tensor.find('.', layer + 7));
}

void expect_gradients_within_wire(std::span<const TrainConfig> layouts) {
  double worst = 0;
  for (const TrainConfig& config : layouts) {
    SCOPED_TRACE(describe_layout(config));
    TrainConfig uncompressed = config;
    uncompressed.parallel.codec = "none";
    const double error = CodecPolicy::parse(config.parallel.codec).gradients.error_bound();
    // Times the format's error bound: the largest error of a sum over the replicas.
    const std::map<std::string, double> magnitudes = sum_magnitudes(
        uncompressed, uncompressed.train.batch / uncompressed.parallel.dp, message_of);
    const StepsOutcome expected = run_one_rank(uncompressed, tiny_corpus());
    const StepsOutcome found = run_steps({config, config}, tiny_corpus());
    double largest = 0;
    for (const TensorDifference& d : compare_tensors(found.gradients, expected.gradients)) {
      const double difference = std::abs(d.found - d.expected);
      const double rounding =
          layout_bound(config.train) * max_magnitude(expected.gradients.at(d.tensor));
      const double bound = error * magnitudes.at(message_of(d.tensor)) + rounding;
      EXPECT_LE(difference, bound) << d.tensor;
      largest = std::max(largest, difference / bound);
    }
    EXPECT_GT(largest, 0.01) << "the format rounds nothing";
    worst = std::max(worst, largest);
  }
  fmt::print("{} layouts, at most {:.2f} of the bound\n", layouts.size(), worst);
}

/// In f32 or bf16 in turn, also with wire formats.
void expect_bits_of_saved_activations(size_t count) {
  std::vector<TrainConfig> layouts = generate_layouts(kSeed + 4);
  std::erase_if(layouts, [](const TrainConfig& c) { return c.train.recompute == "none"; });
  layouts.resize(count);
  for (size_t i = 0; i < count; ++i) {
    TrainConfig& config = layouts[i];
    config.train.dtype = i % 2 == 0 ? "f32" : "bf16";
    if (i % 3 == 0) config.train.recompute_layers = 1;
    if (config.parallel.tp > 1) config.parallel.codec = "attention=int8:g16,mlp=int4:g16";
    SCOPED_TRACE(describe_layout(config));
    TrainConfig saved = config;
    saved.train.recompute = "none";
    saved.train.recompute_layers = 0;
    const StepsOutcome expected = run_steps({saved, saved, kSteps}, tiny_corpus());
    const StepsOutcome found = run_steps({config, config, kSteps}, tiny_corpus());
    EXPECT_EQ(compare_steps(found, expected).front().relative, 0);
    EXPECT_EQ(compare_tensors(found.weights, expected.weights).front().relative, 0);
  }
}

std::vector<TrainConfig> dense_layouts(uint64_t seed) {
  std::vector<TrainConfig> layouts = generate_layouts(seed);
  std::erase_if(layouts, [](const TrainConfig& config) { return config.model.experts > 0; });
  return layouts;
}

/// Without experts, whose choice rounding changes.
std::vector<TrainConfig> bf16_layouts() {
  std::vector<TrainConfig> layouts = dense_layouts(kSeed + 1);
  for (TrainConfig& config : layouts) config.train.dtype = "bf16";
  return layouts;
}

/// Without experts, whose rows are multiplied in other groups.
std::vector<TrainConfig> activation_layouts() {
  return with_wires(dense_layouts(kSeed + 2),
                    {"attention=int8:g16", "mlp=int4:g16", "attention=e4m3:g16,mlp=int8:g16"});
}

/// Without auxiliary loss, which is not a sum over the replicas.
std::vector<TrainConfig> gradient_layouts() {
  std::vector<TrainConfig> layouts = generate_layouts(kSeed + 3);
  for (TrainConfig& config : layouts) config.model.aux_loss_coeff = 0;
  return with_wires(layouts, {"gradients=int8", "gradients=int4:g32", "gradients=e4m3",
                              "gradients=mxfp8", "gradients=int4:g32:hadamard"});
}

/// The dense layouts, of models with biases, norms of heads, sinks, soft caps, GELU, other
/// rotations and factors; in two of three, without a parallel block, also with norms of sums.
/// Without short texts: gradients of the norms of keys of which there are few are differences that
/// cancel.
std::vector<TrainConfig> variant_layouts(std::vector<TrainConfig> layouts) {
  std::erase_if(layouts, [](const TrainConfig& config) {
    return config.model.experts > 0 || config.train.seq < 8 || config.data.document_mask;
  });
  size_t index = 0;
  for (TrainConfig& config : layouts) {
    ModelConfig& model = config.model;
    model.qkv_bias = model.out_bias = model.mlp_bias = model.qk_norm = true;
    model.attention_sinks = true;
    model.attention_softcap = 3, model.logits_softcap = 2;
    model.mlp_activation = "gelu_pytorch_tanh";
    if (model.sliding_window > 0) model.rope_local_theta = 50;
    model.no_rope_layer_interval = 2, model.rotary_dim = 2, model.rope_interleaved = true;
    model.embedding_multiplier = 4, model.residual_multiplier = 0.5;
    model.attention_multiplier = 0.7, model.logits_scaling = 0.5;
    if (index++ % 3 == 0 || model.parallel_block) continue;
    model.zero_centered_norms = index % 3 == 0;
    model.norm_position = model.zero_centered_norms ? "both" : "post";
    if (model.has_pre_norm()) continue;
    model.qk_norm_all_heads = true, model.embedding_multiplier = 1;
    model.qkv_bias = false;  // gradients of k's bias are differences that cancel
  }
  return layouts;
}

std::vector<TrainConfig> first(size_t count, std::vector<TrainConfig> layouts) {
  layouts.resize(count);
  return layouts;
}

TEST(Layouts, GeneratorCoversEverySizeScheduleAndModel) {
  const std::vector<TrainConfig> layouts = generate_layouts(kSeed);
  // As docs/guide/layouts.md says.
  ASSERT_EQ(layouts.size(), 2096u);
  EXPECT_EQ(bf16_layouts().size(), 800u);
  EXPECT_EQ(activation_layouts().size(), 204u);
  EXPECT_EQ(gradient_layouts().size(), 1264u);
  std::set<std::string> names, schedules, scopes, recomputed;
  for (const TrainConfig& config : layouts) {
    names.insert(describe_layout(config));
    scopes.insert(config.train.aux_loss_scope);
    recomputed.insert(config.train.recompute);
    if (config.parallel.pp > 1) schedules.insert(config.parallel.schedule);
  }
  EXPECT_EQ(names.size(), layouts.size()) << "two layouts are the same";
  EXPECT_EQ(schedules.size(), 6u);
  EXPECT_EQ(scopes.size(), 2u);
  EXPECT_EQ(recomputed.size(), 3u);
  EXPECT_EQ(layout_bound(layouts.front().train), 2e-6);
  fmt::print("{} layouts, {} in bf16, {} with wires of activations, {} of gradients\n",
             layouts.size(), bf16_layouts().size(), activation_layouts().size(),
             gradient_layouts().size());
}

TEST(Layouts, ComputeWhatOneRankDoes) {
  expect_one_rank(first(kShort, generate_layouts(kSeed)));
}
TEST(Layouts, ContextParallelOnesComputeWhatOneRankDoes) {
  const std::vector<TrainConfig> layouts = generate_context_layouts(kSeed);
  fmt::print("{} layouts with cp\n", layouts.size());
  expect_one_rank(first(kShortContext, layouts));
}
TEST(Layouts, ThoseOfVariantsComputeWhatOneRankDoes) {
  expect_one_rank(first(kShortOthers, variant_layouts(generate_layouts(kSeed + 4))));
  expect_one_rank(first(2, variant_layouts(generate_context_layouts(kSeed + 4))));
}
TEST(Layouts, ComputeWhatOneRankDoesInBf16) {
  expect_one_rank(first(kShortOthers, bf16_layouts()));
}
TEST(Layouts, KeepTheErrorOfActivationWires) {
  expect_tp_with_wires(first(kShortOthers, activation_layouts()));
}
TEST(Layouts, GradientWiresRoundWithinTheirBound) {
  expect_gradients_within_wire(first(kShortOthers, gradient_layouts()));
}
TEST(Layouts, RecomputationHasTheBitsOfSavedActivations) {
  expect_bits_of_saved_activations(kShortOthers);
}

/// Layouts of at most four ranks, each of two learners. `demo`: with tiles that divide the shards.
std::vector<TrainConfig> learner_layouts(size_t count, bool demo) {
  std::vector<TrainConfig> all;
  for (TrainConfig config : generate_layouts(kSeed)) {
    if (ParallelDims(config.parallel).ranks() > 4) continue;
    config.parallel.dp *= 2;
    config.parallel.sync.method = demo ? "demo" : "local";
    config.parallel.sync.learners = 2;
    config.parallel.sync.every = demo ? 0 : 2;
    config.parallel.sync.tile = demo ? 2 : 0;
    if (config.is_valid() && all.size() < count) all.push_back(config);
  }
  return all;
}

TEST(Layouts, LearnersComputeWhatThoseOfOneRankDo) {
  std::vector<TrainConfig> layouts = learner_layouts(kShortOthers, false);
  for (const TrainConfig& config : learner_layouts(kShortOthers, true)) layouts.push_back(config);
  for (const TrainConfig& config : layouts) {
    SCOPED_TRACE(describe_layout(config) + ", " + config.parallel.sync.method);
    const StepsOutcome expected = run_one_rank(config, tiny_corpus());
    const LayoutCheck check = check_layout(config, tiny_corpus(), expected);
    EXPECT_TRUE(check.ok()) << describe_differences(check);
    // Learners have gradients of their own, and one of them is found that has others.
    EXPECT_TRUE(expected.gradients.contains("learner 1, model.norm.weight"));
    StepHooks hooks;
    hooks.after_passes = [](RankStep& step) {
      if (step.groups.dims().learner(step.groups.world().rank()) == 0) return;
      for (const ModelChunk& chunk : step.ranks.chunks) {
        for (const StateSlice& slice : chunk.optimizer.reduced_gradients()) {
          auto* const values = slice.values.as<float>();
          for (int64_t i = 0; i < slice.values.elements(); ++i) values[i] *= 2;
        }
      }
    };
    const LayoutCheck changed = check_layout(config, tiny_corpus(), expected, hooks);
    EXPECT_FALSE(changed.ok());
    EXPECT_EQ(changed.differences.front().tensor.find("learner 1, "), 0u)
        << describe_differences(changed);
  }
}

TEST(LayoutsLong, ComputeWhatOneRankDoes) {
  expect_one_rank(first(kLong, generate_layouts(kSeed)));
}
TEST(LayoutsLong, ContextParallelOnesComputeWhatOneRankDoes) {
  expect_one_rank(first(kLongContext, generate_context_layouts(kSeed)));
}
TEST(LayoutsLong, ThoseOfVariantsComputeWhatOneRankDoes) {
  expect_one_rank(first(kShort, variant_layouts(generate_layouts(kSeed + 4))));
}
TEST(LayoutsLong, ComputeWhatOneRankDoesInBf16) {
  expect_one_rank(first(kLongOthers, bf16_layouts()));
}
TEST(LayoutsLong, KeepTheErrorOfActivationWires) {
  expect_tp_with_wires(first(kLongOthers, activation_layouts()));
}
TEST(LayoutsLong, GradientWiresRoundWithinTheirBound) {
  expect_gradients_within_wire(first(kLongOthers, gradient_layouts()));
}
TEST(LayoutsLong, RecomputationHasTheBitsOfSavedActivations) {
  expect_bits_of_saved_activations(kLongOthers);
}

}  // namespace
}  // namespace tandem
