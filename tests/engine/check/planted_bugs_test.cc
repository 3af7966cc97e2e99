// Bugs of parallel training, planted in otherwise correct steps: the check finds each and names the
// weight, number or gradients and, if the bug is one axis's, the axis.
#include <gtest/gtest.h>

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "engine/check/layout_check.h"
#include "engine/optim/squares.h"
#include "engine/parallel/dims.h"
#include "engine/train/model_ranks.h"
#include "generated_layouts.h"
#include "planted_changes.h"

namespace tandem {
namespace {

constexpr int64_t kMicrobatches = 4;  // of all layouts here

struct Layout {
  int64_t tp = 1, dp = 1, ep = 1, pp = 1;
  std::string schedule = "1f1b";
  int64_t virtual_stages = 1;
  bool has_experts = false, tied = false;
  std::string recompute = "none";

  auto operator<=>(const Layout&) const = default;
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
  config.train.recompute = layout.recompute;
  check_config(config);
  return config;
}

/// Part of a sum that one of `size` ranks has, if they do not share it.
float partial_sum(const Communicator& ranks) {
  return 2.0f * float(ranks.rank() + 1) / float(ranks.size() * (ranks.size() + 1));
}

StepHooks before_step(OnRank change) {
  StepHooks hooks;
  hooks.before_step = std::move(change);
  return hooks;
}
StepHooks with_config(std::function<void(TrainConfig&)> change) {
  StepHooks hooks;
  hooks.config = std::move(change);
  return hooks;
}
StepHooks with_samples(std::function<int64_t(const RunConfig&, int, int64_t)> samples) {
  StepHooks hooks;
  hooks.samples = std::move(samples);
  return hooks;
}
float num_microbatches(const RunConfig& train, int64_t dp) {
  return float(train.batch / dp / train.microbatch);
}
float inverse_tp(const RankStep& step) {
  return 1 / float(step.groups.dims().tp());
}
float inverse_dp(const RankStep& step) {
  return 1 / float(step.groups.dims().dp());
}
float inverse_ep(const RankStep& step) {
  return 1 / float(step.groups.dims().ep());
}
float inverse_pp(const RankStep& step) {
  return 1 / float(step.groups.dims().pp());
}
float tp_share(const RankStep& step) {
  return partial_sum(step.groups.tp());
}

void count_norm_per_tp_rank(RankStep& step) {
  if (step.groups.tp().rank() == 0) return;
  for (const ModelChunk& chunk : step.ranks.chunks) {
    step.squares += sum_terms(chunk.optimizer.square_terms()).replicated;
  }
}

/// Squares of the experts' gradients, which are the second group of parameters.
double expert_squares(const RankStep& step) {
  std::vector<SquareTerm> terms;
  for (const ModelChunk& chunk : step.ranks.chunks) {
    for (const SquareTerm& term : chunk.optimizer.square_terms()) {
      if (term.group == 1) terms.push_back(term);
    }
  }
  return sum_terms(std::move(terms)).sharded;
}

void count_local_experts_in_norm(RankStep& step) {
  if (step.groups.copies().rank() % step.groups.dims().ep() != 0)
    step.squares -= expert_squares(step);
}

void count_experts_of_one_tp_rank_in_norm(RankStep& step) {
  if (step.groups.tp().rank() != 0) step.squares -= expert_squares(step);
}

void count_first_stage_in_norm(RankStep& step) {
  if (!step.groups.pp()) return;
  step.squares = 0;
  if (step.groups.pp()->rank() > 0) return;
  for (const ModelChunk& chunk : step.ranks.chunks) {
    const Squares of_chunk = sum_terms(chunk.optimizer.square_terms());
    step.squares += of_chunk.sharded + (step.groups.tp().rank() == 0 ? of_chunk.replicated : 0);
  }
}

void count_loss_per_tp_rank(RankStep& step) {
  const auto losses = step.groups.tp().exchange(std::as_bytes(std::span(&step.loss, 1)), "loss");
  std::memcpy(&step.loss, losses[0].data(), sizeof(step.loss));
}

void count_tied_embedding_twice(RankStep& step) {
  const bool is_tied_across = std::ranges::any_of(step.ranks.chunks, [](const ModelChunk& chunk) {
    return chunk.stage.tied_embedding().has_value();
  });
  if (is_tied_across) scale_gradients(step, "embed_tokens", 2);
}

/// The first stage's copy stays what it was when the owner's weights changed.
void keep_tied_copy(RankStep& step) {
  for (const ModelChunk& chunk : step.ranks.chunks) {
    const auto tied = chunk.stage.tied_embedding();
    if (!tied || tied->end() <= chunk.stage.experts_end()) continue;
    auto* const values = chunk.stage.parameters().as<float>();
    for (int64_t i = tied->begin; i < tied->end(); ++i) values[i] *= 0.75f;
  }
}

/// Ranks hold each other's shards of `name`'s gradient.
OnRank swap_shards(const std::string& name, Communicator& (*ranks)(const RankStep&)) {
  return [name, ranks](RankStep& step) {
    std::vector<float> values;
    change_tensors(step, name, true, [&](float& value) { values.push_back(value); });
    Communicator& group = ranks(step);
    const auto all = group.exchange(std::as_bytes(std::span(values)), "shards");
    const auto& other = all[all.size() - 1 - size_t(group.rank())];
    ASSERT_EQ(other.size(), values.size() * sizeof(float));
    std::memcpy(values.data(), other.data(), other.size());
    auto next = values.begin();
    change_tensors(step, name, true, [&](float& value) { value = *next++; });
  };
}
Communicator& tp_ranks(const RankStep& step) {
  return step.groups.tp();
}
Communicator& expert_ranks(const RankStep& step) {
  return *step.groups.experts();
}

/// Ranks add their copies in any order: one of the two ranks is the first.
OnRank break_copy(int tp_rank) {
  return [tp_rank](RankStep& step) {
    if (step.groups.tp().size() == 1 || step.groups.tp().rank() != tp_rank) return;
    scale_gradients(step, "layers.2.input_layernorm", std::numeric_limits<float>::quiet_NaN());
  };
}

/// The last vocabulary row is padding on ranks whose shards are uneven.
void lose_last_word(RankStep& step) {
  const auto& tp = step.groups.tp();
  if (tp.size() == 1 || tp.rank() + 1 < tp.size()) return;
  for (const ModelChunk& chunk : step.ranks.chunks) {
    for (const Parameter& p : chunk.stage.parameter_list()) {
      const LocalShard shard = local_shard(p);
      if (p.name != "lm_head.weight" || shard.rows == 0) continue;
      std::fill_n(
          chunk.stage.gradients().as<float>() + p.offset + (shard.rows - 1) * shard.row_stride,
          shard.columns, 0.0f);
    }
  }
}

/// The last data-parallel rank resumed from another checkpoint.
void load_other_weights(RankStep& step) {
  const auto& dp = step.groups.copies();
  if (dp.size() == 1 || dp.rank() + 1 < dp.size()) return;
  change_tensors(step, "layers.1.mlp.up_proj", false, [](float& value) { value *= 1.25f; });
  for (ModelChunk& chunk : step.ranks.chunks) chunk.stage.parameters_changed();
}

/// Chunks 0 and 1 of every pipeline rank have each other's layers.
void swap_stages(RankStep& step) {
  auto& chunks = step.ranks.chunks;
  if (chunks.size() < 2) return;
  const auto layer_values = [&](size_t chunk) {
    std::vector<float*> values;
    const Stage& stage = chunks[chunk].stage;
    for (const Parameter& p : stage.parameter_list()) {
      if (p.name.find("layers.") == std::string::npos) continue;
      change_values(p, stage.parameters(), [&](float& value) { values.push_back(&value); });
    }
    return values;
  };
  const std::vector<float*> first = layer_values(0), second = layer_values(1);
  ASSERT_EQ(first.size(), second.size());
  for (size_t i = 0; i < first.size(); ++i) std::swap(*first[i], *second[i]);
  for (ModelChunk& chunk : chunks) {
    chunk.stage.parameters_changed();
    chunk.optimizer.adopt_weights(chunk.stage.parameter_staging());
  }
}

/// The second microbatch stores the experts' gradients over those of the first.
StepHooks store_at_second_microbatch() {
  struct Passes {
    std::mutex mutex;
    std::map<std::pair<std::thread::id, int>, int> added;  // in this step, by rank and layer
  };
  StepHooks hooks;
  hooks.expert_gradients = [passes = std::make_shared<Passes>()](int layer, WeightGradients mode) {
    const std::lock_guard lock(passes->mutex);
    int& added = passes->added[{std::this_thread::get_id(), layer}];
    added = mode == WeightGradients::store ? 0 : added + 1;
    return added == 1 ? WeightGradients::store : mode;
  };
  return hooks;
}

struct PlantedBug {
  const char* name;
  Layout layout;
  StepHooks hooks;
  std::string message;  ///< describe_differences
  std::string axis;
};

const Layout kTpDp{2, 2}, kTpPp{2, 1, 1, 2}, kMoe{2, 2, 2, 1, "1f1b", 1, true},
    kMoeDp{1, 4, 2, 1, "1f1b", 1, true}, kMoeEp{1, 2, 2, 1, "1f1b", 1, true},
    kMoePp{1, 1, 1, 2, "1f1b", 1, true}, kTied{1, 2, 1, 2, "1f1b", 1, false, true},
    kInterleaved{1, 1, 1, 2, "interleaved", 2}, kZbV{1, 1, 1, 2, "zb-v", 2},
    kZbH1{1, 1, 1, 2, "zb-h1"}, kRecomputed{2, 1, 1, 1, "1f1b", 1, true, false, "full"};

std::vector<PlantedBug> planted_bugs() {
  // Gradients that the last router's auxiliary loss changes.
  const std::string below_last_router =
      "gradient of model.embed_tokens.weight, "
      "gradient of model.layers.*.block_sparse_moe.gate.weight, "
      "gradient of model.layers.*.input_layernorm.weight, "
      "gradient of model.layers.*.mlp.down_proj.weight, "
      "gradient of model.layers.*.mlp.gate_proj.weight, "
      "gradient of model.layers.*.mlp.up_proj.weight, "
      "gradient of model.layers.*.post_attention_layernorm.weight, "
      "gradient of model.layers.*.self_attn.k_proj.weight, "
      "gradient of model.layers.*.self_attn.o_proj.weight, "
      "gradient of model.layers.*.self_attn.q_proj.weight, "
      "gradient of model.layers.*.self_attn.v_proj.weight, "
      "gradient of model.layers.1.block_sparse_moe.experts.*.w1.weight, "
      "gradient of model.layers.1.block_sparse_moe.experts.*.w2.weight, "
      "gradient of model.layers.1.block_sparse_moe.experts.*.w3.weight";
  const std::string layer_weights =
      "weight model.layers.*.mlp.down_proj.weight, "
      "weight model.layers.*.mlp.gate_proj.weight, "
      "weight model.layers.*.mlp.up_proj.weight, "
      "weight model.layers.*.self_attn.k_proj.weight, "
      "weight model.layers.*.self_attn.o_proj.weight, "
      "weight model.layers.*.self_attn.q_proj.weight, "
      "weight model.layers.*.self_attn.v_proj.weight, ";
  const auto experts = [](const std::string& property) {
    std::string text;
    for (const char* matrix : {"w1", "w2", "w3"}) {
      text += fmt::format("{}gradient of model.layers.*.block_sparse_moe.experts.*.{}.weight{}",
                          text.empty() ? "" : ", ", matrix, property);
    }
    return text;
  };
  return {
      // Gradient norm.
      {"norm counted per TP rank", kTpDp, after_passes(count_norm_per_tp_rank), "grad_norm", "tp"},
      {"norm of this EP rank's experts", kMoeEp, after_passes(count_local_experts_in_norm),
       "grad_norm", "ep"},
      {"norm of one TP rank's experts", kMoe, after_passes(count_experts_of_one_tp_rank_in_norm),
       "grad_norm", "tp"},
      {"norm of the first stage", kTpPp, after_passes(count_first_stage_in_norm),
       "grad_norm (0.7003 x)", "pp"},
      {"norm counted per DP rank", kTpDp,
       after_passes([](RankStep& step) { step.squares *= step.groups.copies().size(); }),
       "grad_norm (1.414 x)", "dp"},
      // Losses.
      {"loss counted per TP rank", kTpDp, after_passes(count_loss_per_tp_rank), "loss (2 x)", "tp"},
      {"loss averaged over DP", kTpDp,
       after_passes([](RankStep& step) { step.loss *= inverse_dp(step); }), "loss (0.5 x)", "dp"},
      {"loss divided by the accumulation", kTpDp, after_passes([](RankStep& step) {
         step.loss /= num_microbatches(step.train, step.groups.dims().dp());
       }),
       "loss (0.25 x)", "microbatches"},
      {"auxiliary loss scaled by TP", kMoe,
       with_config([](TrainConfig& c) { c.model.aux_loss_coeff *= double(c.parallel.tp); }),
       "aux_loss (2 x), grad_norm, " + below_last_router, "tp"},
      {"auxiliary loss of the recomputed passes, too", kRecomputed, with_config([](TrainConfig& c) {
         if (c.train.recompute != "none") c.model.aux_loss_coeff *= 2;
       }),
       "aux_loss (2 x), grad_norm (0.9999 x), " + below_last_router, "recompute"},
      {"auxiliary loss averaged over DP", kMoeDp,
       with_config([](TrainConfig& c) { c.model.aux_loss_coeff /= double(c.parallel.dp); }),
       "aux_loss (0.25 x), grad_norm, " + below_last_router, "dp"},
      {"auxiliary loss of every microbatch added", kMoePp, with_config([](TrainConfig& c) {
         c.model.aux_loss_coeff *= num_microbatches(c.train, c.parallel.dp);
       }),
       "aux_loss (4 x), grad_norm (0.9998 x), " + below_last_router, "microbatches"},
      {"auxiliary loss averaged over stages", kMoePp,
       with_config([](TrainConfig& c) { c.model.aux_loss_coeff /= double(c.parallel.pp); }),
       "aux_loss (0.5 x), grad_norm, " + below_last_router, "pp"},
      // All gradients.
      {"accumulation divided at every microbatch", kTpDp,
       scaled("",
              [](const RankStep& step) {
                return 1 / num_microbatches(step.train, step.groups.dims().dp());
              }),
       "all gradients (0.25 x)", "microbatches"},
      {"gradients averaged over DP", kTpDp, scaled("", inverse_dp), "all gradients (0.5 x)", "dp"},
      {"experts' outputs added per TP rank", kMoe,
       with_config([](TrainConfig& c) { c.model.route_scale *= double(c.parallel.tp); }),
       "grad_norm, loss, all gradients", "tp"},
      {"replicas read the same samples", kTpDp,
       with_samples([](const RunConfig& train, int dp, int64_t sample) {
         return sample % (train.batch / dp);
       }),
       "all numbers, all gradients", "dp"},
      {"last microbatch replaced by the one before",
       {2},
       with_samples([](const RunConfig& train, int, int64_t sample) {
         const int64_t m = train.microbatch;
         return sample < train.batch - m || train.batch == m ? sample : sample - m;
       }),
       "all numbers, all gradients",
       "microbatches"},
      // Some tensors' gradients.
      {"expert gradients averaged over EP", kMoeEp, scaled(".experts.", inverse_ep),
       experts(" (0.5 x)"), "ep"},
      {"expert gradients averaged over DP", kMoeDp, scaled(".experts.", inverse_dp),
       experts(" (0.25 x)"), "dp"},
      {"expert gradients of the first microbatch lost", kMoeEp, store_at_second_microbatch(),
       "grad_norm, " + experts(""), "microbatches"},
      {"expert gradients of one TP rank", kMoe, scaled(".experts.", inverse_tp),
       experts(" (0.5 x)"), "tp"},
      {"experts swapped between EP ranks", kMoeEp,
       after_passes(swap_shards("experts", expert_ranks)), experts(""), "ep"},
      {"norm gradient not reduced over TP", kTpPp, scaled("layernorm", tp_share),
       "gradient of model.layers.*.input_layernorm.weight (copies differ), gradient of "
       "model.layers.*.post_attention_layernorm.weight (copies differ)",
       "tp"},
      {"final norm's gradient added per TP rank", kTpPp,
       scaled("model.norm", [](const RankStep& step) { return 1 / inverse_tp(step); }),
       "gradient of model.norm.weight (2 x)", "tp"},
      {"router gradient not reduced over TP", kMoe, scaled("block_sparse_moe.gate", tp_share),
       "gradient of model.layers.*.block_sparse_moe.gate.weight (copies differ)", "tp"},
      {"tied embedding counted twice", kTied, after_passes(count_tied_embedding_twice),
       "gradient of model.embed_tokens.weight (2 x)", "pp"},
      {"tied embedding averaged over its stages", kTied, scaled("embed_tokens", inverse_pp),
       "gradient of model.embed_tokens.weight (0.5 x)", "pp"},
      {"head gradient scaled by the stages", kZbH1, scaled("lm_head", inverse_pp),
       "gradient of lm_head.weight (0.5 x)", "pp"},
      {"shards of row-parallel weights swapped", kTpPp,
       after_passes(swap_shards("o_proj", tp_ranks)),
       "gradient of model.layers.*.self_attn.o_proj.weight", "tp"},
      {"shards of fused keys swapped", kTpPp,
       after_passes(swap_shards("layers.1.self_attn.k_proj", tp_ranks)),
       "gradient of model.layers.1.self_attn.k_proj.weight", "tp"},
      {"last word lost in padding",
       {4},
       after_passes(lose_last_word),
       "gradient of lm_head.weight",
       "tp"},
      {"NaN on TP rank 0", kTpDp, after_passes(break_copy(0)),
       "gradient of model.layers.2.input_layernorm.weight (NaN)", "tp"},
      {"NaN on TP rank 1", kTpDp, after_passes(break_copy(1)),
       "gradient of model.layers.2.input_layernorm.weight (NaN)", "tp"},
      // Weights.
      {"replica resumed with another model", kTpDp, before_step(load_other_weights),
       "weight model.layers.1.mlp.up_proj.weight (copies differ), all numbers, all gradients",
       "dp"},
      {"tied embedding's copy is old", kTied, before_step(keep_tied_copy),
       "weight model.embed_tokens.weight (copies differ), all numbers, all gradients", "pp"},
      {"stages of interleaved chunks swapped", kInterleaved, before_step(swap_stages),
       layer_weights + "all numbers, all gradients", "pp"},
      {"stages of a V swapped", kZbV, before_step(swap_stages),
       layer_weights + "all numbers, all gradients", "pp"},
  };
}

/// Outcomes on one rank, and that the layout passes without bugs.
class Correct {
 public:
  const StepsOutcome& outcome(const Layout& layout) {
    const auto found = outcomes_.find(layout);
    if (found != outcomes_.end()) return found->second;
    const TrainConfig config = make_config(layout);
    StepsOutcome& one = outcomes_[layout] = run_one_rank(config, tiny_corpus());
    const LayoutCheck correct = check_layout(config, tiny_corpus(), one);
    EXPECT_TRUE(correct.ok()) << describe_differences(correct);
    EXPECT_EQ(describe_differences(correct), "");
    EXPECT_EQ(correct.axis, "");
    return one;
  }

 private:
  std::map<Layout, StepsOutcome> outcomes_;
};

TEST(PlantedBugs, AreFoundAndNamed) {
  Correct correct;
  for (const PlantedBug& bug : planted_bugs()) {
    SCOPED_TRACE(bug.name);
    const StepsOutcome& expected = correct.outcome(bug.layout);
    const LayoutCheck check =
        check_layout(make_config(bug.layout), tiny_corpus(), expected, bug.hooks);
    EXPECT_FALSE(check.ok());
    EXPECT_EQ(describe_differences(check), bug.message);
    EXPECT_EQ(check.axis, bug.axis);
  }
}

TEST(PlantedBugs, DroppedMicrobatchIsFound) {
  const TrainConfig config = make_config({2});
  const StepsOutcome expected = run_one_rank(config, tiny_corpus());
  TrainConfig dropped = config;
  dropped.train.batch -= dropped.train.microbatch;
  const LayoutCheck check = check_layout(dropped, tiny_corpus(), expected);
  EXPECT_FALSE(check.ok());
  EXPECT_EQ(describe_differences(check), "all numbers, all gradients");
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
