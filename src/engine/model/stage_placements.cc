#include "engine/model/stage_placements.h"

#include <fmt/format.h>

#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace tandem {
namespace placement {
namespace {

/// Ranks that share a step's tokens.
constexpr Axes kTokens{Axis::tp, Axis::ep, Axis::expert_dp};

class StageDeclaration {
 public:
  StageDeclaration(const ModelConfig& config, const ModelLayout& layout, const StageLayers& layers,
                   PlacementTable& table)
      : config_(config), names_(config), layout_(layout), layers_(layers), table_(table) {}

  StageMessages run() {
    for (const Parameter& p : layout_.parameters) {
      if (!p.sharding.absent) table_.add(placed_parameter(p, layers_.pp_rank));
    }
    PlacedTensor x = forward_embedding();
    const size_t num_branches = layout_.branches.size();
    std::vector<Saved> saved;
    for (size_t i = 0; i < num_branches; ++i) saved.push_back(forward_branch(i, x));
    PlacedTensor dx = head_or_received(x);
    messages_.output = x;
    for (size_t i = num_branches; i-- > 0;) dx = backward_branch(i, saved[i], dx);
    messages_.d_input = dx;
    backward_embedding(dx);
    return messages_;
  }

 private:
  /// Tensors that a branch's backward pass reads.
  struct Saved {
    PlacedTensor x, x_norm;
    std::optional<PlacedTensor> hidden, inner, scores, routing, load;
  };
  struct Weights {
    PlacedTensor in, out;
  };

  /// Tensor with a row per token.
  PlacedTensor rows(std::string name, std::string made_by, Placement over_tp) const {
    return {std::move(name),
            std::move(made_by),
            {over_tp, kRows, kRows, Placement::on_rank(layers_.pp_rank)}};
  }
  PlacedTensor tokens(const char* name) const { return rows(name, "read", kReplicated); }

  std::string layer(size_t branch) const {
    return fmt::format("layers.{}.", layers_.first + int64_t(branch) / layout_.branches_per_layer);
  }
  std::string prefix(size_t branch) const {
    const BranchLayout& b = layout_.branches[branch];
    return layer(branch) + (b.attention ? "attention." : b.moe ? "moe." : "mlp.");
  }

  std::vector<std::string> in_parameters(size_t branch) const {
    const BranchLayout& b = layout_.branches[branch];
    std::vector<std::string> names;
    if (b.attention) names = {"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"};
    for (const char* name : {"gate_proj", "up_proj"}) {
      if (b.mlp) names.push_back(mlp_name(b) + name);
    }
    return whole_names(branch, std::move(names));
  }
  std::vector<std::string> bias_parameters(size_t branch) const {
    std::vector<std::string> names;
    for (const char* name : {"q_proj", "k_proj", "v_proj"}) {
      names.push_back(fmt::format("model.{}self_attn.{}.bias", layer(branch), name));
    }
    return names;
  }
  std::vector<std::string> out_parameters(size_t branch) const {
    const BranchLayout& b = layout_.branches[branch];
    std::vector<std::string> names;
    if (b.attention) names = {"self_attn.o_proj"};
    if (b.mlp) names.push_back(mlp_name(b) + "down_proj");
    return whole_names(branch, std::move(names));
  }
  std::string mlp_name(const BranchLayout& b) const { return b.moe ? names_.shared : "mlp."; }
  std::string norm_parameter(size_t branch) const {
    return "model." + layer(branch) +
           (layout_.branches[branch].attention ? "input_layernorm" : "post_attention_layernorm") +
           ".weight";
  }
  std::string router_parameter(size_t branch) const {
    return "model." + layer(branch) + names_.router;
  }
  std::vector<std::string> expert_parameters(size_t branch,
                                             std::initializer_list<const char*> matrices) const {
    std::vector<std::string> names;
    for (int64_t e = 0; e < config_.experts; ++e) {
      for (const char* matrix : matrices) {
        names.push_back("model." + layer(branch) + names_.expert(e) + matrix);
      }
    }
    return names;
  }
  std::vector<std::string> whole_names(size_t branch, std::vector<std::string> names) const {
    for (std::string& name : names) name = "model." + layer(branch) + name + ".weight";
    return names;
  }
  std::string head_parameter() const {
    return config_.tie_word_embeddings ? kEmbedding : "lm_head.weight";
  }

  Operands all(const std::vector<std::string>& names) const {
    Operands tensors;
    for (const std::string& name : names) tensors.push_back(table_.at(name));
    return tensors;
  }
  /// Declares the gradients of parameters that are parts of one matrix.
  void add_gradients(const std::vector<std::string>& parameters, PlacedTensor gradient) {
    for (const std::string& parameter : parameters) {
      gradient.name = gradient_name(parameter);
      table_.add(gradient);
    }
  }
  Weights product_weights(size_t branch) const {
    return {fuse(all(in_parameters(branch)), prefix(branch) + "in"),
            fuse(all(out_parameters(branch)), prefix(branch) + "out")};
  }
  Weights expert_weights(size_t branch) const {
    return {fuse_experts(all(expert_parameters(branch, {names_.gate, names_.up})),
                         prefix(branch) + "in"),
            fuse_experts(all(expert_parameters(branch, {names_.down})), prefix(branch) + "out")};
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

  Saved forward_branch(size_t i, PlacedTensor& x) {
    const BranchLayout& b = layout_.branches[i];
    const std::string name = prefix(i);
    Saved saved{x, norm(x, norm_parameter(i), name + "x_norm"), {}, {}, {}, {}, {}};
    if (b.has_products()) {
      const Weights weights = product_weights(i);
      saved.hidden = table_.add(ag_gemm(saved.x_norm, weights.in, name + "hidden"));
      Operands inner;
      if (b.attention) {
        const Operands qkv(3, *saved.hidden);
        inner.push_back(attention("attention", qkv, name + "attention"));
      }
      if (b.mlp) inner.push_back(elementwise("swiglu", {*saved.hidden}, name + "swiglu"));
      saved.inner = inner.front();
      if (inner.size() > 1) saved.inner = fuse(inner, "");
      saved.inner->name = name + "inner";
      table_.add(*saved.inner);
      const PlacedTensor& sum = table_.add(gemm_rs(*saved.inner, weights.out, name + "sum"));
      x = add(x, sum, name + (b.moe ? "shared_output" : "output"));
      table_.add(x);
    }
    if (b.moe) forward_experts(i, saved, x);
    return saved;
  }

  void forward_experts(size_t i, Saved& saved, PlacedTensor& x) {
    const std::string name = prefix(i);
    const PlacedTensor& logits =
        table_.add(gemm(saved.x_norm, transposed(table_.at(router_parameter(i))), name + "logits"));
    const Operands bias = router_bias(i);
    saved.scores = table_.add(by_rows("route", {logits}, {}, name + "scores"));
    saved.routing = table_.add(by_rows("route", {logits}, bias, name + "routing"));
    const PlacedTensor& load = table_.add(
        sum_of_rows("router_load", {*saved.scores, *saved.routing}, name + "load, local rows"));
    saved.load = table_.add(all_reduce(load, kTokens, name + "load"));
    if (!bias.empty()) {
      table_.add(elementwise("adjust_router_bias", {bias.front(), *saved.load},
                             bias.front().name + ", adjusted"));
    }
    const Weights weights = expert_weights(i);
    const PlacedTensor& routed = table_.add(experts("experts", {saved.x_norm, *saved.routing},
                                                    weights.in, weights.out, name + "routed"));
    x = table_.add(add(x, routed, name + "output"));
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
    add_norm_gradient(norm_name, x, {d_x_norm});
    return table_.add(
        by_rows("rms_norm_backward", {x, d_x_norm}, {table_.at(norm_name)}, "head.d_input"));
  }

  /// Every rank sees only its rows of the residual stream.
  void add_norm_gradient(const std::string& weight, const PlacedTensor& x,
                         const Operands& d_x_norm) {
    std::optional<PlacedTensor> sum;
    for (const PlacedTensor& d : d_x_norm) {
      const PlacedTensor term =
          sum_of_rows("rms_norm_backward", {x, d}, gradient_name(weight) + ", local rows");
      sum = sum ? add(*sum, term, term.name) : term;
    }
    table_.add(*sum);
    table_.add(all_reduce(*sum, kTp, gradient_name(weight)));
  }

  PlacedTensor backward_branch(size_t i, const Saved& saved, PlacedTensor dx) {
    const BranchLayout& b = layout_.branches[i];
    Operands d_x_norm;
    if (b.moe) d_x_norm.push_back(backward_experts(i, saved, dx));
    if (b.has_products()) d_x_norm.push_back(backward_products(i, saved, dx));
    add_norm_gradient(norm_parameter(i), saved.x, d_x_norm);
    for (const PlacedTensor& d : d_x_norm) {
      dx = add(dx,
               by_rows("rms_norm_backward", {saved.x, d}, {table_.at(norm_parameter(i))},
                       d.name + ", through the norm"),
               prefix(i) + "d_input");
    }
    return table_.add(dx);
  }

  PlacedTensor backward_products(size_t i, const Saved& saved, const PlacedTensor& dy) {
    const BranchLayout& b = layout_.branches[i];
    const std::string name = prefix(i);
    const Weights weights = product_weights(i);
    const PlacedTensor& d_inner =
        table_.add(ag_gemm(dy, transposed(weights.out), name + "d_inner"));
    const PlacedTensor gathered = all_gather(dy, kTp, kRows, dy.name + ", all rows");
    add_gradients(out_parameters(i), gemm(transposed(gathered), *saved.inner, ""));
    PlacedTensor d_hidden =
        b.attention ? attention("attention_backward", {*saved.hidden, *saved.inner, d_inner},
                                name + "d_hidden")
                    : elementwise("swiglu_backward", {*saved.hidden, d_inner}, name + "d_hidden");
    table_.add(d_hidden);
    add_gradients(in_parameters(i), ag_wgrad(saved.x_norm, d_hidden, ""));
    if (b.qkv_bias >= 0) add_gradients(bias_parameters(i), column_sums(d_hidden, ""));
    if (b.q_norm >= 0) add_head_norm_gradients(i, *saved.hidden, d_hidden);
    if (b.has_shared_gate) add_gate_gradient(i, saved, d_inner);
    return table_.add(gemm_rs(d_hidden, transposed(weights.in), name + "d_x_norm"));
  }

  /// Every rank sees only its heads: their sum is a product with ones.
  void add_head_norm_gradients(size_t i, const PlacedTensor& hidden, const PlacedTensor& d_hidden) {
    const PlacedTensor by_head =
        attention("rms_norm_heads_backward", {hidden, d_hidden}, prefix(i) + "d_head_norms");
    PlacedTensor ones = constant("ones, each head", kColumns);
    for (const char* name : {"q_norm", "k_norm"}) {
      const std::string gradient =
          gradient_name(fmt::format("model.{}self_attn.{}.weight", layer(i), name));
      const PlacedTensor& sum =
          table_.add(gemm(ones, column_sums(by_head, ""), gradient + ", local heads"));
      table_.add(all_reduce(sum, kTp, gradient));
    }
  }
  /// Every rank sees only its columns of the shared expert.
  void add_gate_gradient(size_t i, const Saved& saved, const PlacedTensor& d_inner) {
    const PlacedTensor products =
        elementwise("gate_rows_backward", {*saved.inner, d_inner}, prefix(i) + "d_gate, terms");
    const PlacedTensor d_gate =
        gemm(products, constant("ones, each column", kRows), prefix(i) + "d_gate, local columns");
    const std::string gradient = gradient_name("model." + layer(i) + names_.shared_gate);
    const PlacedTensor gathered = all_gather(saved.x_norm, kTp, kRows, "");
    const PlacedTensor& sum =
        table_.add(gemm(transposed(d_gate), gathered, gradient + ", local columns"));
    table_.add(all_reduce(sum, kTp, gradient));
  }
  PlacedTensor constant(const char* name, Placement over_tp) const {
    PlacedTensor tensor{name, "constant"};
    tensor.over(Axis::tp) = over_tp;
    tensor.over(Axis::pp) = Placement::on_rank(layers_.pp_rank);
    return tensor;
  }

  PlacedTensor backward_experts(size_t i, const Saved& saved, const PlacedTensor& dy) {
    const std::string name = prefix(i);
    const Weights weights = expert_weights(i);
    const Operands rows{dy, saved.x_norm, *saved.routing};
    for (const auto& [matrix, names] :
         {std::pair{weights.in, expert_parameters(i, {names_.gate, names_.up})},
          std::pair{weights.out, expert_parameters(i, {names_.down})}}) {
      const PlacedTensor gradients = experts_gradient(rows, matrix, matrix.name + " gradient");
      for (const std::string& parameter : names) {
        table_.add(one_expert(gradients, table_.at(parameter).over(Axis::ep).rank(),
                              gradient_name(parameter)));
      }
    }
    const PlacedTensor d_rows =
        experts("experts_backward", rows, weights.in, weights.out, name + "d_rows");
    const PlacedTensor d_routing =
        experts("experts_backward", rows, weights.in, weights.out, name + "d_routing");
    const PlacedTensor d_logits =
        table_.add(by_rows("route_backward", {*saved.scores, *saved.routing, d_routing},
                           balance_gradient(i, saved), name + "d_logits"));
    const PlacedTensor& router = table_.at(router_parameter(i));
    const PlacedTensor& gradient = table_.add(gemm(
        transposed(d_logits), saved.x_norm, gradient_name(router_parameter(i)) + ", local rows"));
    table_.add(all_reduce(gradient, kTp, gradient_name(router_parameter(i))));
    return table_.add(
        add(d_rows, gemm(d_logits, router, name + "d_logits x router"),
            name + (layout_.branches[i].has_products() ? "d_routed_x_norm" : "d_x_norm")));
  }

  /// Gradient of the auxiliary loss, which is a function of the load of all tokens.
  Operands balance_gradient(size_t i, const Saved& saved) {
    if (config_.aux_loss_coeff == 0) return {};
    table_.add(elementwise("aux_loss", {*saved.load}, prefix(i) + "aux_loss"));
    return {table_.add(elementwise("balance_gradient", {*saved.load}, prefix(i) + "d_scores"))};
  }

  /// Adjusted by the load and not by its gradient, which is 0.
  Operands router_bias(size_t i) {
    if (layout_.branches[i].router_bias < 0) return {};
    const PlacedTensor& bias = table_.at("model." + layer(i) + names_.router_bias);
    PlacedTensor zero{gradient_name(bias.name), "clear", bias.placements};
    zero.over(Axis::ep) = zero.over(Axis::expert_dp) = Placement::partial();
    table_.add(std::move(zero));
    return {bias};
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
  const ExpertNames names_;
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

std::string gradient_name(const std::string& tensor) {
  return tensor + ", gradient";
}

StageMessages declare_stage(const ModelConfig& config, const ModelLayout& layout,
                            const StageLayers& layers, PlacementTable& table) {
  return placement::StageDeclaration(config, layout, layers, table).run();
}

}  // namespace tandem
