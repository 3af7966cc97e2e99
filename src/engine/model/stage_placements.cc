#include "engine/model/stage_placements.h"

#include <fmt/format.h>

#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace tandem {
namespace placement {
namespace {

class StageDeclaration {
 public:
  StageDeclaration(const ModelConfig& config, const ModelLayout& layout, const StageLayers& layers,
                   PlacementTable& table)
      : config_(config), layout_(layout), layers_(layers), table_(table) {}

  StageMessages run() {
    for (const Parameter& p : layout_.parameters) {
      if (!p.sharding.absent) table_.add(placed_parameter(p, layers_.pp_rank));
    }
    PlacedTensor x = forward_embedding();
    const size_t num_branches = layout_.branches.size();
    std::vector<program::Declaration> branches;
    for (size_t i = 0; i < num_branches; ++i) {
      const std::string layer =
          fmt::format("layers.{}.", layers_.first + int64_t(i) / layout_.branches_per_layer);
      branches.emplace_back(config_, layout_.branches[i].program, layer, layers_.pp_rank, table_);
      branches.back().forward(x);
    }
    PlacedTensor dx = head_or_received(x);
    messages_.output = x;
    for (size_t i = num_branches; i-- > 0;) branches[i].backward(dx);
    messages_.d_input = dx;
    backward_embedding(dx);
    return messages_;
  }

 private:
  /// Tensor with a row per token.
  PlacedTensor rows(std::string name, std::string made_by, Placement over_tp) const {
    return {std::move(name),
            std::move(made_by),
            {over_tp, kRows, kRows, kRows, Placement::on_rank(layers_.pp_rank)}};
  }
  PlacedTensor tokens(const char* name) const { return rows(name, "read", kReplicated); }

  std::string head_parameter() const {
    return config_.tie_word_embeddings ? kEmbedding : "lm_head.weight";
  }

  PlacedTensor forward_embedding() {
    if (layers_.embedding) table_.add(tokens("tokens"));
    if (!layers_.embedding) {
      messages_.input = rows(fmt::format("layers.{}.input", layers_.first), "send", kRows);
      return table_.add(*messages_.input);
    }
    if (layout_.tied == TiedEmbedding::copy) {
      PlacedTensor copy = placed_parameter(layout_.parameters.front(), layers_.pp_rank);
      copy.name += ", copy";
      copy.made_by = "send";
      table_.add(std::move(copy));
    }
    const PlacedTensor& looked_up = table_.add(
        embedding(table_.at("tokens"), table_.at(embedding_weight()), "embedding.looked_up"));
    return table_.add(reduce_scatter(looked_up, kTp, kRows, "embedding.output"));
  }
  std::string embedding_weight() const {
    return std::string(kEmbedding) + (layout_.tied == TiedEmbedding::copy ? ", copy" : "");
  }

  PlacedTensor norm(const PlacedTensor& x, const std::string& weight, std::string name) {
    return table_.add(by_rows("rms_norm", {x}, {table_.at(weight)}, std::move(name)));
  }

  PlacedTensor head_or_received(const PlacedTensor& x) {
    if (!layers_.head) {
      messages_.d_output = rows(x.name + ", gradient", "send", kRows);
      return table_.add(*messages_.d_output);
    }
    const char* const norm_name = "model.norm.weight";
    const PlacedTensor x_norm = norm(x, norm_name, "head.x_norm");
    const PlacedTensor weight = table_.at(head_parameter());
    const PlacedTensor& targets = table_.add(tokens("targets"));
    const PlacedTensor& logits = table_.add(ag_gemm(x_norm, weight, "head.logits"));
    table_.add(cross_entropy(logits, targets, "loss"));
    const PlacedTensor& d_logits =
        table_.add(cross_entropy_backward(logits, targets, "head.d_logits"));
    const PlacedTensor& d_x_norm =
        table_.add(gemm_rs(d_logits, transposed(weight), "head.d_x_norm"));
    head_gradient_ = ag_wgrad(x_norm, d_logits, gradient_name(head_parameter()));
    if (!config_.tie_word_embeddings) table_.add(*head_gradient_);
    const PlacedTensor& gradient =
        table_.add(sum_of_rows("rms_norm_backward", {x, d_x_norm},
                               gradient_name(norm_name) + std::string(", local rows")));
    table_.add(all_reduce(gradient, kTp, gradient_name(norm_name)));
    return table_.add(
        by_rows("rms_norm_backward", {x, d_x_norm}, {table_.at(norm_name)}, "head.d_input"));
  }

  void backward_embedding(const PlacedTensor& dx) {
    if (layout_.tied == TiedEmbedding::owner) return add_lookups_of_other_stage();
    if (!layers_.embedding || layout_.tied == TiedEmbedding::copy) return;
    add_embedding_gradient(table_.at("tokens"), dx);
  }
  void add_lookups_of_other_stage() {
    PlacedTensor dx = rows("gradient of another stage's lookups", "residual", kRows);
    dx.over(Axis::pp) = Placement::on_rank(0);
    dx = table_.add(send(dx, Axis::pp, layers_.pp_rank, "head.d_embedding_output"));
    add_embedding_gradient(table_.add(tokens("head.tokens")), dx);
  }
  void add_embedding_gradient(const PlacedTensor& tokens, const PlacedTensor& dx) {
    const PlacedTensor gathered = all_gather(dx, kTp, kRows, dx.name + ", all rows");
    const PlacedTensor gradient =
        embedding_gradient(tokens, gathered, table_.at(kEmbedding), gradient_name(kEmbedding));
    table_.add(head_gradient_ && config_.tie_word_embeddings
                   ? add(*head_gradient_, gradient, gradient.name)
                   : gradient);
  }

  static constexpr const char* kEmbedding = "model.embed_tokens.weight";
  const ModelConfig& config_;
  const ModelLayout& layout_;
  const StageLayers& layers_;
  PlacementTable& table_;
  std::optional<PlacedTensor> head_gradient_;
  StageMessages messages_;
};

}  // namespace
}  // namespace placement

PlacedTensor placed_parameter(const Parameter& p, int pp_rank) {
  PlacedTensor placed{p.name, "parameter"};
  if (p.sharding.over_tp()) placed.over(Axis::tp) = Placement::sharded(p.sharding.tp_dim);
  if (p.sharding.over_ep()) placed.over(Axis::ep) = Placement::on_rank(p.sharding.ep_rank);
  placed.over(Axis::pp) = Placement::on_rank(pp_rank);
  return placed;
}

StageMessages declare_stage(const ModelConfig& config, const ModelLayout& layout,
                            const StageLayers& layers, PlacementTable& table) {
  return placement::StageDeclaration(config, layout, layers, table).run();
}

}  // namespace tandem
