// Placements of a training step: every layout's are consistent, and wrong wirings are found and
// named.
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

#include "engine/model/layout.h"
#include "engine/model/stage_placements.h"
#include "engine/parallel/step_placements.h"
#include "generated_layouts.h"

namespace tandem {
namespace {

TEST(Placements, OfAllGeneratedLayoutsAreConsistent) {
  for (const TrainConfig& config : generate_layouts(5)) {
    SCOPED_TRACE(describe_layout(config));
    EXPECT_NO_THROW(step_placements(config.model, config.parallel));
  }
}

TEST(Placements, CoverParametersGradientsAndLosses) {
  TrainConfig config = tiny_config(true);
  config.model.tie_word_embeddings = true;
  config.model.router_bias_update_rate = 0.001;
  config.parallel.tp = config.parallel.ep = config.parallel.pp = 2;
  config.parallel.dp = 4;
  const PlacementTable table = step_placements(config.model, config.parallel);
  const ModelLayout whole(config.model, 2, 0, {2, 0});
  for (const Parameter& p : whole.parameters) {
    EXPECT_EQ(table.at(p.name + ", updated").placements, table.at(p.name).placements);
  }
  using enum Axis;
  EXPECT_EQ(table.at("loss").over(tp), Placement::replicated());
  EXPECT_EQ(table.at("loss").over(ep), Placement::partial());
  EXPECT_EQ(table.at("loss").over(pp), Placement::on_rank(1));
  const PlacedTensor& expert =
      table.at("model.layers.1.block_sparse_moe.experts.3.w2.weight, gradient");
  EXPECT_EQ(expert.over(tp), Placement::sharded(1));
  EXPECT_EQ(expert.over(ep), Placement::on_rank(1));
  EXPECT_EQ(expert.over(expert_dp), Placement::partial());
}

/// Model of two layers, the second with experts, as one stage.
struct Model {
  Model() : config(tiny_config(true).model), layout(make_layout()) {}
  ModelLayout make_layout() {
    config.layers = 2;
    return ModelLayout(config, 2, 0, {2, 0});
  }
  Sharding& sharding(const std::string& name) {
    return std::ranges::find(layout.parameters, name, &Parameter::name)->sharding;
  }
  PlacementTable declare() const {
    PlacementTable table;
    declare_stage(config, layout, {}, table);
    return table;
  }

  ModelConfig config;
  ModelLayout layout;
};

struct WrongWiring {
  const char* name;
  std::function<void()> declare;
  std::string message;
};

/// Parameters with another sharding than their operators need.
std::vector<WrongWiring> wrong_shardings() {
  const auto with = [](const char* parameter, Sharding sharding) {
    return [=] {
      Model model;
      model.sharding(parameter) = sharding;
      model.declare();
    };
  };
  return {
      {"row-parallel weight sharded by output features",
       with("model.layers.0.self_attn.o_proj.weight", {.tp_dim = 0}),
       "gemm_rs: layers.0.attention.out over tp: found sharded(0), expected sharded(1)"},
      {"one of the fused matrices replicated", with("model.layers.0.self_attn.k_proj.weight", {}),
       "fuse: model.layers.0.self_attn.k_proj.weight over tp: found replicated, expected "
       "sharded(0)"},
      {"norm sharded", with("model.layers.0.input_layernorm.weight", {.tp_dim = 0}),
       "rms_norm: model.layers.0.input_layernorm.weight over tp: found sharded(0), expected "
       "replicated"},
      {"head replicated", with("lm_head.weight", {}),
       "ag_gemm: lm_head.weight over tp: found replicated, expected sharded(0)"},
      {"router sharded by experts",
       with("model.layers.1.block_sparse_moe.gate.weight", {.tp_dim = 0}),
       "gemm: model.layers.1.block_sparse_moe.gate.weight^T over tp: found sharded(1), expected "
       "replicated"},
      {"expert on all EP ranks",
       with("model.layers.1.block_sparse_moe.experts.2.w3.weight", {.tp_dim = 0}),
       "fuse_experts: model.layers.1.block_sparse_moe.experts.2.w3.weight over ep: found "
       "replicated, expected one rank"},
  };
}

/// Wrong continuations of a right table. `t`: its tensor by name.
std::vector<WrongWiring> wrong_steps() {
  using namespace placement;
  using Tensors = std::function<const PlacedTensor&(const std::string&)>;
  const auto with = [](const std::function<void(const Tensors& t)>& declare) {
    return [declare] {
      const PlacementTable table = Model().declare();
      declare([&](const std::string& name) -> const PlacedTensor& { return table.at(name); });
    };
  };
  const auto synced_over = [](Axes axes) {
    return [axes] {
      Model model;
      PlacementTable table = model.declare();
      declare_step(std::vector<CopiedParameters>{{model.layout.parameters, axes}}, table);
    };
  };
  const std::string gate = "model.layers.1.block_sparse_moe.gate.weight",
                    norm = "model.layers.0.input_layernorm.weight",
                    expert = "model.layers.1.block_sparse_moe.experts.0.w1.weight";
  return {
      {"norm gradient not summed over TP", with([norm](const Tensors& t) {
         gradient_sync(t(norm + ", gradient, local rows"), t(norm), kCopies, "g");
       }),
       "gradient_sync: " + norm +
           ", gradient, local rows over tp: found partial, expected replicated"},
      {"router gradient not summed over TP", with([gate](const Tensors& t) {
         gradient_sync(t(gate + ", gradient, local rows"), t(gate), kCopies, "g");
       }),
       "gradient_sync: " + gate +
           ", gradient, local rows over tp: found partial, expected replicated"},
      {"router gradient summed over TP twice",
       with([gate](const Tensors& t) { placement::all_reduce(t(gate + ", gradient"), kTp, "g"); }),
       "all_reduce: " + gate + ", gradient over tp: found replicated, expected partial"},
      {"bias added on every rank of a partial sum", with([norm](const Tensors& t) {
         const PlacedTensor partial =
             placement::gemm(t("layers.0.attention.inner"),
                             transposed(t("model.layers.0.self_attn.o_proj.weight")), "partial");
         placement::add(partial, {"bias", "", t(norm).placements}, "sum");
       }),
       "add: bias over tp: found replicated, expected partial"},
      {"residual stream added on every rank of a partial sum", with([](const Tensors& t) {
         const PlacedTensor partial =
             placement::gemm(t("layers.0.attention.inner"),
                             transposed(t("model.layers.0.self_attn.o_proj.weight")), "partial");
         const PlacedTensor x = placement::all_gather(t("embedding.output"), kTp, kRows, "x");
         placement::add(partial, x, "sum");
       }),
       "add: x over tp: found replicated, expected partial"},
      {"attention on the rows of one rank", with([](const Tensors& t) {
         attention("attention", {t("layers.0.attention.x_norm")}, "out");
       }),
       "attention: layers.0.attention.x_norm over tp: found sharded(0), expected sharded(1)"},
      {"lookups in a shard of the vocabulary not summed", with([norm](const Tensors& t) {
         by_rows("rms_norm", {t("embedding.looked_up")}, {t(norm)}, "x_norm");
       }),
       "rms_norm: embedding.looked_up over tp: found partial, expected no partial sum"},
      {"cross-entropy of a shard of the vocabulary", with([](const Tensors& t) {
         sum_of_rows("cross_entropy", {t("head.logits"), t("targets")}, "loss");
       }),
       "cross_entropy: targets over tp: found replicated, expected sharded(1)"},
      {"auxiliary loss counted on every TP rank", with([](const Tensors& t) {
         placement::all_reduce(t("layers.1.moe.aux_loss"), kTp, "aux_loss");
       }),
       "all_reduce: layers.1.moe.aux_loss over tp: found replicated, expected partial"},
      {"auxiliary loss of a rank's local rows", with([](const Tensors& t) {
         elementwise("balance_gradient", {t("layers.1.moe.load, local rows")}, "balance");
       }),
       "balance_gradient: layers.1.moe.load, local rows over tp: found partial, expected no "
       "partial "
       "sum"},
      {"loss counted on every TP rank", with([](const Tensors& t) {
         placement::all_reduce(t("loss"), {Axis::tp, Axis::cp, Axis::ep, Axis::expert_dp}, "loss");
       }),
       "all_reduce: loss over tp: found replicated, expected partial"},
      {"loss of the last stage only", with([](const Tensors& t) {
         placement::all_reduce(count_once(t("loss"), kTp, "loss"),
                               {Axis::tp, Axis::cp, Axis::ep, Axis::expert_dp, Axis::pp}, "loss");
       }),
       "all_reduce: loss over pp: found rank 0, expected partial"},
      {"squares of replicated tensors counted on every TP rank", with([norm](const Tensors& t) {
         const auto squares = [&](const std::string& p) {
           return placement::sum_of_squares(gradient_sync(t(p + ", gradient"), t(p), kCopies, p),
                                            p + ", squares");
         };
         placement::add(squares("lm_head.weight"), squares(norm), "squares");
       }),
       "add: " + norm + ", squares over tp: found replicated, expected partial"},
      {"gradient norm that depends on the experts' rank", with([expert](const Tensors& t) {
         const PlacedTensor g =
             gradient_sync(t(expert + ", gradient"), t(expert), kExpertCopies, "g");
         const PlacedTensor sum =
             placement::all_reduce(placement::sum_of_squares(g, "squares"),
                                   {Axis::tp, Axis::cp, Axis::expert_dp, Axis::pp}, "norm");
         update(g, t(expert), sum, kExpertCopies, "w");
       }),
       "update: norm over ep: found partial, expected replicated"},
      {"norm of gradients before their reduction", with([](const Tensors& t) {
         placement::sum_of_squares(t("lm_head.weight, gradient"), "squares");
       }),
       "sum_of_squares: lm_head.weight, gradient over cp: found partial, expected no partial sum"},
      {"gradients of the tied embedding on two stages", with([](const Tensors& t) {
         const PlacedTensor& head = t("lm_head.weight, gradient");
         PlacedTensor lookups = t("model.embed_tokens.weight, gradient");
         lookups.over(Axis::pp) = Placement::on_rank(1);
         placement::add(head, lookups, "gradient");
       }),
       "add: model.embed_tokens.weight, gradient over pp: found rank 1, expected rank 0"},
      {"updated weights not gathered", with([](const Tensors& t) {
         ag_gemm(t("head.x_norm"), owned_shard(t("lm_head.weight"), kCopies, "owned"), "logits");
       }),
       "ag_gemm: owned^T over cp: found sharded(flat), expected replicated"},
      {"experts reduced over DP", synced_over(kCopies),
       "gradient_sync: " + expert + ", gradient over ep: found rank 0, expected partial"},
      {"gradients not summed over CP", synced_over(kDp),
       "gradient_sync: model.embed_tokens.weight, gradient over cp: found partial, expected "
       "replicated"},
      {"replicated tensors reduced over the experts' replicas", synced_over(kExpertCopies),
       "gradient_sync: model.embed_tokens.weight, gradient over ep: found partial, expected "
       "replicated"},
  };
}

TEST(Placements, WrongWiringsAreFoundAndNamed) {
  Model().declare();
  for (const auto& wirings : {wrong_shardings(), wrong_steps()}) {
    for (const WrongWiring& wiring : wirings) {
      try {
        wiring.declare();
        ADD_FAILURE() << wiring.name << ": not found";
      } catch (const std::logic_error& error) {
        EXPECT_EQ(error.what(), wiring.message) << wiring.name;
      }
    }
  }
}

TEST(Placements, NamesAreUniqueAndKnown) {
  PlacementTable table = Model().declare();
  EXPECT_THROW(table.add({"loss", "", {}}), std::logic_error);
  EXPECT_THROW((void)table.at("lost"), std::logic_error);
}

}  // namespace
}  // namespace tandem
