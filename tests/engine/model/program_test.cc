// A layer's list of operations, and figures that are computed from it.
#include <gtest/gtest.h>

#include <string>

#include "engine/model/program/cost.h"
#include "tandem/error.h"

namespace tandem::program {
namespace {

ModelConfig make_model() {
  ModelConfig c;
  c.hidden = 64, c.heads = 4, c.kv_heads = 2, c.head_dim = 16, c.ffn = 176;
  return c;
}
ModelConfig make_experts() {
  ModelConfig c = make_model();
  c.experts = 4, c.top_k = 2, c.expert_ffn = 64, c.shared_ffn = 32, c.moe_layer_freq = 2;
  c.shared_expert_gate = c.qk_norm = true;
  return c;
}

std::string describe(const LayerProgram& layer) {
  std::string text;
  for (const BranchProgram& branch : layer.branches) {
    text += std::string(text.empty() ? "" : "; ") + branch.name + ":";
    for (const Op& op : branch.ops) text += std::string(" ") + op.row->name;
  }
  return text;
}

TEST(Program, ListsTheOperationsOfALayer) {
  ModelConfig c = make_model();
  EXPECT_EQ(describe(make_layer(c, 0)),
            "attention: rms_norm column_gemm attention row_gemm; "
            "mlp: rms_norm column_gemm swiglu row_gemm");
  c.parallel_block = c.qkv_bias = true;
  EXPECT_EQ(describe(make_layer(c, 0)),
            "attention: rms_norm column_gemm column_bias attention swiglu row_gemm");
  c.mlp_bias = true;
  EXPECT_EQ(describe(make_layer(c, 0)),
            "attention: rms_norm column_gemm column_bias column_bias attention swiglu row_gemm "
            "sum_bias");
  c = make_model();
  c.qkv_bias = c.out_bias = c.mlp_bias = c.qk_norm = c.rope_interleaved = true;
  c.residual_multiplier = 0.5, c.no_rope_layer_interval = 2;
  const std::string mlp =
      "mlp: rms_norm column_gemm column_bias swiglu row_gemm sum_bias sum_scale";
  EXPECT_EQ(describe(make_layer(c, 0)),
            "attention: rms_norm column_gemm column_bias qk_norm rotary_order attention row_gemm "
            "sum_bias sum_scale; " +
                mlp);
  EXPECT_EQ(describe(make_layer(c, 1)),
            "attention: rms_norm column_gemm column_bias qk_norm attention row_gemm sum_bias "
            "sum_scale; " +
                mlp);
  c = make_model();
  c.norm_position = "post", c.qk_norm = c.qk_norm_all_heads = c.out_bias = true;
  EXPECT_EQ(describe(make_layer(c, 0)),
            "attention: round_stream column_gemm qk_norm_all_heads attention row_gemm sum_bias "
            "sum_norm; mlp: round_stream column_gemm swiglu row_gemm sum_norm");
  c.norm_position = "both", c.qk_norm_all_heads = false, c.residual_multiplier = 0.5;
  EXPECT_EQ(describe(make_layer(c, 0)),
            "attention: rms_norm column_gemm qk_norm attention row_gemm sum_bias sum_norm "
            "sum_scale; mlp: rms_norm column_gemm swiglu row_gemm sum_norm sum_scale");
  EXPECT_EQ(describe(make_layer(make_experts(), 1)),
            "attention: rms_norm column_gemm qk_norm attention row_gemm; "
            "moe: rms_norm column_gemm swiglu shared_expert_gate row_gemm router experts");
  c = make_experts();
  c.router_logit_bias = c.expert_bias = true;
  EXPECT_EQ(describe({{make_layer(c, 1).branches.back()}}),
            "moe: rms_norm column_gemm swiglu shared_expert_gate row_gemm router_bias router "
            "expert_bias experts");
}

/// Bytes of 512 tokens in bf16 on two ranks.
BranchBytes bytes_of(const ModelConfig& c, int64_t layer, size_t branch, bool on_gpus) {
  return branch_bytes(
      make_layer(c, layer).branches[branch],
      {.model = c, .tokens = 512, .tp = 2, .ep = 2, .element = 2, .on_gpus = on_gpus});
}

TEST(Program, CountsActivationsByTheirLife) {
  const BranchBytes attention = bytes_of(make_model(), 0, 0, false);
  EXPECT_EQ(attention.saved, 512 / 2 * 4 + 512 * 128 / 2 * 2);  // 1 / rms; q, k and v
  EXPECT_EQ(attention.recomputed, 512 / 2 * 64 * 2 + 512 * 64 / 2 * 2 + 512 * 4 / 2 * 4);
  EXPECT_EQ(attention.pending(Recompute::none), 512 * (64 + 128 / 2) * 2);
  EXPECT_EQ(attention.pending(Recompute::full), 512 * (64 + 128 / 2) * 2 + 2 * 32768);
  EXPECT_EQ(attention.saved_by(Recompute::none), 66560 + 69632);
  EXPECT_EQ(attention.saved_by(Recompute::full), 0);
  ModelConfig after = make_model();
  after.norm_position = "post", after.qk_norm = after.qk_norm_all_heads = true;
  EXPECT_EQ(bytes_of(after, 0, 0, false).saved,  // q, k and v; q and k before; 1 / rms; the sum
            512 * 128 / 2 * 2 + 512 * 96 / 2 * 2 + 512 * 2 * 4 + 512 / 2 * 64 * 2);
  const ModelConfig experts = make_experts();
  EXPECT_EQ(bytes_of(experts, 1, 0, false).saved, 66560 + 512 * 96 / 2 * 2);  // q and k before
  const BranchBytes moe = bytes_of(experts, 1, 1, false);
  EXPECT_EQ(moe.saved, 1024 + 512 * (64 / 2 + 16) * 2 + 8192);  // shared expert and gate; routing
  EXPECT_EQ(moe.recomputed, 32768 + 16384 + 409600);
  EXPECT_EQ(bytes_of(experts, 1, 1, true).recomputed, 32768 + 16384 + 589312);
}

TEST(Program, RefusesWhatGpusCannotRun) {
  ModelConfig c = make_experts();
  const auto error = [&]() -> std::string {
    try {
      check_gpus(c, 2);
    } catch (const ConfigError& e) {
      return e.what();
    }
    return "";
  };
  EXPECT_EQ(error(), "");
  c.shared_ffn = 40;
  EXPECT_EQ(error(), "model.shared_ffn = 40: expected a multiple of 16 on GPUs");
  c.ffn = 100;
  EXPECT_EQ(error(), "model.ffn = 100: expected a multiple of 16 on GPUs");
  c.moe_layer_freq = 1, c.shared_ffn = 0;
  EXPECT_EQ(error(), "");
  c = make_model();
  c.qkv_bias = c.out_bias = c.mlp_bias = true;
  c.no_rope_layer_interval = 2, c.attention_multiplier = 0.1, c.logits_scaling = 4;
  EXPECT_EQ(error(), "");
  c.attention_sinks = true;
  EXPECT_EQ(error(),
            "model.attention_sinks: sinks of heads: GPUs have no kernel of attention: expected "
            "--device cpu");
  c.attention_sinks = false, c.mlp_activation = "gelu_pytorch_tanh";
  EXPECT_EQ(error(),
            "model.mlp_activation: another function than silu: GPUs have no kernel of swiglu: "
            "expected --device cpu");
  c.attention_softcap = 50;
  EXPECT_EQ(error(),
            "model.attention_softcap: capped scores: GPUs have no kernel of attention: expected "
            "--device cpu");
  c.mlp_activation = "silu", c.attention_softcap = 0, c.logits_softcap = 30;
  EXPECT_EQ(error(), "model.logits_softcap: GPUs have no kernel of it: expected --device cpu");
  c = make_experts();
  c.swiglu_limit = 7;
  EXPECT_EQ(error(),
            "model.swiglu_limit: clamped experts: GPUs have no kernel of experts: expected "
            "--device cpu");
  c.expert_bias = true;
  EXPECT_EQ(error(),
            "model.expert_bias: biases of experts: GPUs have no kernel of expert_bias: expected "
            "--device cpu");
  c.router_logit_bias = true;
  EXPECT_EQ(error(),
            "model.router_logit_bias: biases of routers: GPUs have no kernel of router_bias: "
            "expected --device cpu");
  c = make_model();
  c.rotary_dim = 8;
  EXPECT_EQ(error(),
            "model.rotary_dim, model.rope_interleaved: another order of heads: GPUs have no kernel "
            "of rotary_order: expected --device cpu");
  c.rotary_dim = 0, c.embedding_multiplier = 12;
  EXPECT_EQ(error(),
            "model.residual_multiplier, model.embedding_multiplier: factors of branches: GPUs have "
            "no kernel of sum_scale: expected --device cpu");
  c.embedding_multiplier = 1, c.norm_position = "post";
  EXPECT_EQ(error(),
            "model.norm_position: norms after branches: GPUs have no kernel of sum_norm: expected "
            "--device cpu");
  c.norm_position = "pre", c.qk_norm = c.qk_norm_all_heads = true;
  EXPECT_EQ(error(),
            "model.qk_norm_all_heads: norms of all heads at once: GPUs have no kernel of "
            "qk_norm_all_heads: expected --device cpu");
  c.qk_norm_all_heads = false, c.zero_centered_norms = true;
  EXPECT_EQ(error(),
            "model.zero_centered_norms: GPUs have no kernel of norms by 1 + weight: expected "
            "--device cpu");
}

}  // namespace
}  // namespace tandem::program
