// Bugs of parallel training, planted in otherwise correct steps: the check finds each and names the
// tensor and, if the bug is one axis's, the axis.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <limits>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "engine/check/layout_check.h"
#include "engine/optim/squares.h"
#include "engine/parallel/dims.h"
#include "engine/train/model_ranks.h"
#include "generated_layouts.h"

namespace tandem {
namespace {

constexpr int64_t kMicrobatches = 4;  // of all layouts here

struct Layout {
  int64_t tp = 1, dp = 1, ep = 1, pp = 1;
  const char* schedule = "1f1b";
  int64_t virtual_stages = 1;
  bool has_experts = false, tied = false;
};

TrainConfig make_config(const Layout& layout) {
  TrainConfig config = tiny_config(layout.has_experts);
  config.model.tie_word_embeddings = layout.tied;
  auto& parallel = config.parallel;
  parallel.tp = layout.tp;
  parallel.dp = layout.dp;
  parallel.ep = layout.ep;
  parallel.pp = layout.pp;
  parallel.schedule = layout.schedule;
  parallel.virtual_stages = layout.virtual_stages;
  config.train.microbatch = config.train.batch / layout.dp / kMicrobatches;
  check_config(config);
  return config;
}

/// This rank's shard of a tensor.
void change_values(const Parameter& p, const Tensor& flat,
                   const std::function<void(float&)>& change) {
  const LocalShard shard = local_shard(p);
  for (int64_t row = 0; row < shard.rows; ++row) {
    for (int64_t column = 0; column < shard.columns; ++column) {
      change(flat.as<float>()[p.offset + row * shard.row_stride + column]);
    }
  }
}

/// Gradients of the tensors whose name contains `name`.
void scale_gradients(const ModelRanks& ranks, std::string_view name, float factor) {
  for (const ModelChunk& chunk : ranks.chunks) {
    for (const Parameter& p : chunk.stage.parameter_list()) {
      if (p.name.find(name) == std::string::npos) continue;
      change_values(p, chunk.stage.gradients(), [factor](float& value) { value *= factor; });
    }
  }
}

/// Part of a sum that one of `size` ranks has, if they do not share it.
float partial_sum(const Communicator& ranks) {
  return 2.0f * float(ranks.rank() + 1) / float(ranks.size() * (ranks.size() + 1));
}

using AfterCompute =
    std::function<void(const ParallelGroups&, ModelRanks&, double& loss, double& squares)>;

AfterCompute scaled(std::string name, std::function<float(const ParallelGroups&)> factor) {
  return [name, factor](const ParallelGroups& groups, ModelRanks& ranks, double&, double&) {
    scale_gradients(ranks, name, factor(groups));
  };
}

void count_norm_per_tp_rank(const ParallelGroups& groups, ModelRanks& ranks, double&,
                            double& squares) {
  if (groups.tp().rank() == 0) return;
  for (const ModelChunk& chunk : ranks.chunks) {
    squares += sum_terms(chunk.optimizer.square_terms()).replicated;
  }
}

void count_loss_per_tp_rank(const ParallelGroups& groups, ModelRanks&, double& loss, double&) {
  const auto losses = groups.tp().exchange(std::as_bytes(std::span(&loss, 1)), "loss");
  std::memcpy(&loss, losses[0].data(), sizeof(loss));
}

void count_tied_embedding_twice(const ParallelGroups&, ModelRanks& ranks, double&, double&) {
  const bool is_tied_across = std::ranges::any_of(ranks.chunks, [](const ModelChunk& chunk) {
    return chunk.stage.tied_embedding().has_value();
  });
  if (is_tied_across) scale_gradients(ranks, "embed_tokens", 2);
}

/// Ranks hold each other's shards.
void swap_tp_shards(const ParallelGroups& groups, ModelRanks& ranks, double&, double&) {
  for (const ModelChunk& chunk : ranks.chunks) {
    for (const Parameter& p : chunk.stage.parameter_list()) {
      if (p.name.find("o_proj") == std::string::npos) continue;
      std::vector<float> values;
      change_values(p, chunk.stage.gradients(), [&](float& value) { values.push_back(value); });
      const auto all = groups.tp().exchange(std::as_bytes(std::span(values)), "shards");
      const auto& other = all[all.size() - 1 - size_t(groups.tp().rank())];
      std::memcpy(values.data(), other.data(), other.size());
      auto next = values.begin();
      change_values(p, chunk.stage.gradients(), [&](float& value) { value = *next++; });
    }
  }
}

/// Ranks add their copies in any order: one of the two ranks is the first.
AfterCompute break_copy(int tp_rank) {
  return [tp_rank](const ParallelGroups& groups, ModelRanks& ranks, double&, double&) {
    if (groups.tp().size() == 1 || groups.tp().rank() != tp_rank) return;
    scale_gradients(ranks, "layers.2.input_layernorm", std::numeric_limits<float>::quiet_NaN());
  };
}

/// Chunks 0 and 1 of every pipeline rank have each other's layers.
void swap_stages(const ParallelGroups&, ModelRanks& ranks) {
  if (ranks.chunks.size() < 2) return;
  const auto layer_values = [&](size_t chunk) {
    std::vector<float*> values;
    const Stage& stage = ranks.chunks[chunk].stage;
    for (const Parameter& p : stage.parameter_list()) {
      if (p.name.find("layers.") == std::string::npos) continue;
      change_values(p, stage.parameters(), [&](float& value) { values.push_back(&value); });
    }
    return values;
  };
  const std::vector<float*> first = layer_values(0), second = layer_values(1);
  ASSERT_EQ(first.size(), second.size());
  for (size_t i = 0; i < first.size(); ++i) std::swap(*first[i], *second[i]);
  for (ModelChunk& chunk : ranks.chunks) {
    chunk.stage.parameters_changed();
    chunk.optimizer.adopt_weights();
  }
}

struct PlantedBug {
  const char* name;
  Layout layout;
  StepHooks hooks;
  /// Part of the names of all tensors that differ; empty: all gradients may.
  std::string tensor;
  std::string axis;  ///< empty: no single one
};

std::vector<PlantedBug> planted_bugs() {
  const auto tp_share = [](const ParallelGroups& g) { return partial_sum(g.tp()); };
  const auto inverse = [](int (ParallelDims::*size)() const) {
    return [size](const ParallelGroups& g) { return 1.0f / float((g.dims().*size)()); };
  };
  return {
      {"norm counted per TP rank", {2, 2}, {{}, count_norm_per_tp_rank}, "grad_norm", "tp"},
      {"loss counted per TP rank", {2, 2}, {{}, count_loss_per_tp_rank}, "loss", "tp"},
      {"accumulation divided twice",
       {2, 2},
       {{}, scaled("", [](const auto&) { return 1.0f / kMicrobatches; })},
       "",
       ""},
      {"gradients averaged over DP",
       {2, 2},
       {{}, scaled("", inverse(&ParallelDims::dp))},
       "",
       "dp"},
      {"expert gradients averaged over EP",
       {1, 2, 2, 1, "1f1b", 1, true},
       {{}, scaled(".experts.", inverse(&ParallelDims::ep))},
       ".experts.",
       "ep"},
      {"norm gradient not reduced over TP",
       {2, 1, 1, 2},
       {{}, scaled("layernorm", tp_share)},
       "layernorm",
       "tp"},
      {"router gradient not reduced over TP",
       {2, 2, 2, 1, "1f1b", 1, true},
       {{}, scaled("block_sparse_moe.gate", tp_share)},
       "block_sparse_moe.gate",
       "tp"},
      {"tied embedding counted twice",
       {1, 2, 1, 2, "1f1b", 1, false, true},
       {{}, count_tied_embedding_twice},
       "embed_tokens",
       "pp"},
      {"head gradient scaled by the stages",
       {1, 1, 1, 2, "zb-h1"},
       {{}, scaled("lm_head", inverse(&ParallelDims::pp))},
       "lm_head",
       "pp"},
      {"shards of TP ranks swapped", {2, 1, 1, 2}, {{}, swap_tp_shards}, "o_proj", "tp"},
      {"NaN on TP rank 0", {2, 2}, {{}, break_copy(0)}, "layers.2.input_layernorm", "tp"},
      {"NaN on TP rank 1", {2, 2}, {{}, break_copy(1)}, "layers.2.input_layernorm", "tp"},
      {"stage order swapped", {1, 1, 1, 2, "interleaved", 2}, {swap_stages}, "", "pp"},
      {"last microbatch replaced by the one before",
       {2},
       {{}, {}, [](int64_t sample) { return sample < 6 ? sample : sample - 2; }},
       "",
       ""},
  };
}

TEST(PlantedBugs, AreFoundAndNamed) {
  for (const PlantedBug& bug : planted_bugs()) {
    SCOPED_TRACE(bug.name);
    const TrainConfig config = make_config(bug.layout);
    const StepsOutcome expected = run_steps({one_rank_config(config), config}, tiny_corpus());
    const LayoutCheck correct = check_layout(config, tiny_corpus(), expected, {});
    EXPECT_TRUE(correct.ok()) << correct.worst().tensor << " " << correct.worst().relative;
    EXPECT_EQ(correct.axis, "");
    const LayoutCheck check = check_layout(config, tiny_corpus(), expected, bug.hooks);
    EXPECT_FALSE(check.ok());
    EXPECT_NE(check.worst().tensor.find(bug.tensor), std::string::npos) << check.worst().tensor;
    EXPECT_EQ(check.axis, bug.axis);
    for (const TensorDifference& d : check.differences) {
      if (d.relative <= check.bound) continue;
      EXPECT_NE(d.tensor.find(bug.tensor), std::string::npos) << d.tensor;
    }
  }
}

TEST(PlantedBugs, DroppedMicrobatchIsFound) {
  const TrainConfig config = make_config({2});
  const StepsOutcome expected = run_steps({one_rank_config(config), config}, tiny_corpus());
  TrainConfig dropped = config;
  dropped.train.batch -= dropped.train.microbatch;
  const LayoutCheck check = check_layout(dropped, tiny_corpus(), expected, {});
  EXPECT_FALSE(check.ok());
  for (const TensorDifference& d : check.differences) {
    EXPECT_GT(d.relative, check.bound) << d.tensor;
  }
}

TEST(PlantedBugs, TensorOfOneSideAndOtherShapesAreFound) {
  const GatheredTensor tensor{{2}, {1, 2}, {1, 2}};
  GatheredTensor transposed = tensor;
  transposed.shape = {2, 1};
  EXPECT_EQ(compare_tensors({{"a", tensor}}, {{"a", tensor}}).front().relative, 0);
  const GatheredTensors both{{"a", tensor}, {"b", tensor}};
  for (const auto& differences :
       {compare_tensors({{"a", tensor}}, both), compare_tensors(both, {{"a", tensor}}),
        compare_tensors({{"a", tensor}, {"b", transposed}}, both)}) {
    ASSERT_EQ(differences.size(), 2u);
    EXPECT_EQ(differences.front().tensor, "b");
    EXPECT_FALSE(differences.front().relative <= 1);
  }
  // A value of any copy counts.
  const GatheredTensor copies{{2}, {1, 1}, {1, 2}};
  EXPECT_EQ(compare_tensors({{"a", copies}}, {{"a", tensor}}).front().relative, 0.5);
}

}  // namespace
}  // namespace tandem
