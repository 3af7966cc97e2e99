#include <algorithm>
#include <string>
#include <utility>

#include "engine/model/program/program.h"
#include "kernels/row_ops.h"

namespace tandem::program {
namespace {

using enum Life;

/// Names of the norms before and after a branch.
struct NormNames {
  const char *before, *after = "";
};

/// Branch that begins with a norm, or without one. Between its two GEMMs, whose matrices `project`
/// and `consume` add to, are the operations of `add`, and after `end_gemms` those that follow.
struct Builder {
  Builder(const ModelConfig& c, const char* name, const NormNames& norm_names)
      : hidden{c.hidden}, norms(norm_names), initial(c.initial_norm()), branch{name, {}, {}, {}} {
    branch.values = {{"x_norm", Rows::local, hidden, recomputed},
                     {.name = "inverse_rms",
                      .rows = Rows::local,
                      .columns = {c.has_pre_norm() ? 1 : 0},
                      .life = saved,
                      .dtype = DType::f32,
                      .by_columns = true},
                     {"hidden", Rows::all, {}, saved},
                     {"inner", Rows::all, {}, recomputed}};
    if (c.has_pre_norm()) {
      add({&kRmsNorm, {}, {kXNorm, kInverseRms}}, {{norms.before, hidden, {}, initial}});
    } else {
      add({&kRoundStream, {}, {kXNorm}});
    }
  }
  /// Columns of the column-parallel GEMM's output, by their weight.
  ValueId project(const char* name, const Features& columns, const std::string& matrix) {
    in.weights.push_back(weight({matrix, columns, hidden}));
    return branch.add({name, Rows::all, columns, saved, {}, kHidden});
  }
  /// Columns of the row-parallel GEMM's input, by theirs.
  ValueId consume(const char* name, const Features& columns, const std::string& matrix) {
    out.weights.push_back(weight({matrix, hidden, columns}));
    return branch.add({name, Rows::all, columns, recomputed, {}, kInner});
  }
  void add(Op op, const std::vector<Weight>& weights = {}) {
    for (const Weight& each : weights) op.weights.push_back(weight(each));
    branch.ops.push_back(std::move(op));
  }
  /// Bias of columns, before all operations on columns: those next to each other share a gradient.
  void add_bias(const std::vector<ValueId>& columns, const std::vector<Weight>& weights) {
    add({&kColumnBias, columns, columns}, weights);
    std::rotate(branch.ops.begin() + 1, branch.ops.end() - 1, branch.ops.end());
  }
  /// Operation on the row-parallel GEMM's sum.
  void add_sum_bias(const std::string& name) {
    const ValueId term =
        branch.add({"d_sum_bias", Rows::one, {1, hidden.count()}, scratch, DType::f32});
    of_sum.push_back({&kSumBias, {}, {term}, {weight({name, hidden, {}, 0})}});
  }
  void add_sum_norm() {
    const ValueId before = branch.add({"unnormalized sum", Rows::local, hidden, saved}),
                  term = branch.add(
                      {"d_sum_norm", Rows::one, {1, hidden.count()}, scratch, DType::f32});
    of_sum.push_back({&kSumNorm, {}, {before, term}, {weight({norms.after, hidden, {}, initial})}});
  }
  void end_gemms(const ModelConfig& c) {
    branch.ops.insert(branch.ops.begin() + 1, std::move(in));
    branch.ops.push_back(std::move(out));
    if (c.has_post_norm()) add_sum_norm();
    if (c.branch_scale() != 1) of_sum.push_back({&kSumScale, {}, {}});
    for (Op& op : of_sum) branch.ops.push_back(std::move(op));
  }
  size_t weight(const Weight& weight) {
    branch.weights.push_back(weight);
    return branch.weights.size() - 1;
  }

  Features hidden;
  NormNames norms;
  float initial;  ///< weight of norms
  Op in{&kColumnGemm, {kXNorm}, {kHidden}}, out{&kRowGemm, {kInner}, {}};
  std::vector<Op> of_sum;
  BranchProgram branch;
};

Features divided(int64_t units, int64_t width = 1) {
  return {units, width, Division::divided};
}

Rotation rotation_of(const ModelConfig& c, int64_t layer) {
  if (!c.has_rope(layer)) return Rotation::none;
  return c.rope_local_theta > 0 && c.window(layer) > 0 ? Rotation::local : Rotation::usual;
}

/// Norms of q and k, of each head or of all at once.
void add_qk_norms(const ModelConfig& c, ValueId q, ValueId k, Builder& b) {
  const Features head{c.head_dim}, heads = b.branch.columns(q), kv_heads = b.branch.columns(k);
  const ValueId q_before = b.branch.add({"unnormalized q", Rows::all, heads, saved}),
                k_before = b.branch.add({"unnormalized k", Rows::all, kv_heads, saved});
  if (c.qk_norm_all_heads) {
    Value sums{.name = "inverse_rms of q and k",
               .rows = Rows::all,
               .columns = {2},
               .life = saved,
               .dtype = DType::f32,
               .by_columns = true};
    const ValueId inverse_rms = b.branch.add(sums);
    sums.name = "products of q and k", sums.life = scratch;
    const ValueId products = b.branch.add(sums);
    return b.add({&kQkNormAllHeads, {q, k}, {q_before, k_before, inverse_rms, products}},
                 {{"self_attn.q_norm.weight", heads, {}, b.initial},
                  {"self_attn.k_norm.weight", kv_heads, {}, b.initial}});
  }
  const ValueId partial_sums = b.branch.add({"partial sums of d_qk_norm",
                                             Rows::one,
                                             {kHeadPartialSums, c.head_dim},
                                             scratch,
                                             DType::f32}),
                sums = b.branch.add({"d_qk_norm", Rows::one, {2, c.head_dim}, scratch, DType::f32});
  b.add({&kQkNorm, {q, k}, {q_before, k_before, partial_sums, sums}},
        {{"self_attn.q_norm.weight", head, {}, b.initial},
         {"self_attn.k_norm.weight", head, {}, b.initial}});
}

void add_attention(const ModelConfig& c, int64_t layer, Builder& b) {
  const Features heads = divided(c.heads, c.head_dim),
                 kv_heads{c.kv_heads, c.head_dim, Division::shared};
  const ValueId q = b.project("q", heads, "self_attn.q_proj.weight"),
                k = b.project("k", kv_heads, "self_attn.k_proj.weight"),
                v = b.project("v", kv_heads, "self_attn.v_proj.weight"),
                out = b.consume("attention", heads, "self_attn.o_proj.weight");
  if (c.qkv_bias) {
    b.add_bias({q, k, v}, {{"self_attn.q_proj.bias", heads, {}, 0},
                           {"self_attn.k_proj.bias", kv_heads, {}, 0},
                           {"self_attn.v_proj.bias", kv_heads, {}, 0}});
  }
  if (c.qk_norm) add_qk_norms(c, q, k, b);
  if (c.out_bias) b.add_sum_bias("self_attn.o_proj.bias");
  if (c.has_rope(layer) && (c.rope_interleaved || c.rotary_features() != c.head_dim)) {
    b.add({&kRotaryOrder, {q, k}, {q, k}});
  }
  const ValueId log_sums = b.branch.add({.name = "log_sums",
                                         .rows = Rows::all,
                                         .columns = divided(c.heads),
                                         .life = recomputed,
                                         .dtype = DType::f32,
                                         .by_columns = true});
  std::vector<Weight> sinks;
  if (c.attention_sinks) sinks.push_back({"self_attn.sinks", divided(c.heads), {}, 0});
  b.add({.row = &kAttention,
         .in = {q, k, v},
         .out = {out, log_sums},
         .window = c.window(layer),
         .rotation = rotation_of(c, layer)},
        sinks);
}

/// `name`: "mlp." or the shared expert's. Returns the result.
ValueId add_mlp(int64_t ffn, const std::string& name, Builder& b, bool has_bias = false) {
  const ValueId gate = b.project("gate", divided(ffn), name + "gate_proj.weight"),
                up = b.project("up", divided(ffn), name + "up_proj.weight"),
                out = b.consume("mlp", divided(ffn), name + "down_proj.weight");
  if (has_bias) {
    b.add_bias({gate, up}, {{name + "gate_proj.bias", divided(ffn), {}, 0},
                            {name + "up_proj.bias", divided(ffn), {}, 0}});
    b.add_sum_bias(name + "down_proj.bias");
  }
  b.add({&kSwiglu, {gate, up}, {out}});
  return out;
}

/// Columns of a shared expert's gate: one, and zeros so that rows are multiples of 16 bytes, also
/// in e4m3.
constexpr int64_t kGateColumns = 16;

/// Names are Mixtral's, or Qwen's for a model with biases or norms of q and k; the router's are
/// GPT-OSS's for fused experts.
BranchProgram make_moe(const ModelConfig& c) {
  const bool is_qwen = c.qkv_bias || c.qk_norm;
  const std::string prefix = is_qwen ? "mlp." : "block_sparse_moe.", expert = prefix + "experts.*.";
  const Features hidden{c.hidden}, experts{c.experts}, ffn = divided(c.ffn_per_expert());
  Builder b(c, "moe", {"post_attention_layernorm.weight"});
  if (c.shared_ffn > 0) {
    const ValueId mlp = add_mlp(c.shared_ffn, prefix + "shared_expert.", b);
    if (c.shared_expert_gate) {
      const ValueId gate =
          b.branch.add({"shared_gate", Rows::all, {kGateColumns}, saved, {}, kHidden});
      b.add({&kGateRows, {gate}, {mlp}},
            {{prefix + "shared_expert_gate.weight", {1}, hidden, 1, true}});
    }
    b.end_gemms(c);
  }
  const std::string gate = prefix + (c.fused_experts ? "router" : "gate");
  std::vector<Weight> router{{gate + ".weight", experts, hidden}};
  if (c.router_bias_update_rate > 0) {
    router.push_back({gate + ".e_score_correction_bias", experts, {}, 0});
  }
  const ValueId scores = b.branch.add({"scores", Rows::local, experts, saved, DType::f32}),
                chosen = b.branch.add({"chosen", Rows::local, {c.top_k}, saved, DType::i32}),
                weights = b.branch.add({"weights", Rows::local, {c.top_k}, saved, DType::f32}),
                rows = b.branch.add({"experts", Rows::all, {}, recomputed});
  if (c.router_logit_bias) b.add({&kRouterBias, {}, {}}, {{gate + ".bias", experts, {}, 0}});
  b.add({&kRouter, {kXNorm}, {scores, chosen, weights}}, router);
  if (c.expert_bias) {
    b.add({&kExpertBias, {chosen, weights}, {}},
          {{prefix + "experts.down_proj_bias", {c.experts, c.hidden}, {}, 0}});
  }
  const std::string names[] = {is_qwen ? "gate_proj" : "w1", is_qwen ? "down_proj" : "w2",
                               is_qwen ? "up_proj" : "w3"};
  std::vector<Weight> matrices{{expert + names[0] + ".weight", ffn, hidden},
                               {expert + names[1] + ".weight", hidden, ffn},
                               {expert + names[2] + ".weight", ffn, hidden}};
  if (c.expert_bias) {
    matrices.push_back({expert + names[0] + ".bias", ffn, {}, 0});
    matrices.push_back({expert + names[2] + ".bias", ffn, {}, 0});
  }
  b.add({.row = &kExperts, .in = {kXNorm, chosen, weights}, .out = {rows}, .copies = c.experts},
        matrices);
  return std::move(b.branch);
}

}  // namespace

LayerProgram make_layer(const ModelConfig& c, int64_t layer) {
  Builder attention(c, "attention", {"input_layernorm.weight", "post_attention_layernorm.weight"});
  add_attention(c, layer, attention);
  if (c.parallel_block) add_mlp(c.ffn, "mlp.", attention, c.mlp_bias);
  attention.end_gemms(c);
  if (c.parallel_block) return {{std::move(attention.branch)}};
  if (c.is_moe(layer)) return {{std::move(attention.branch), make_moe(c)}};
  const bool has_both = c.has_pre_norm() && c.has_post_norm();
  Builder mlp(c, "mlp",
              {has_both ? "pre_feedforward_layernorm.weight" : "post_attention_layernorm.weight",
               "post_feedforward_layernorm.weight"});
  add_mlp(c.ffn, "mlp.", mlp, c.mlp_bias);
  mlp.end_gemms(c);
  return {{std::move(attention.branch), std::move(mlp.branch)}};
}

}  // namespace tandem::program
