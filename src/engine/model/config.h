// Shape of a Llama-style decoder.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "kernels/rope_scaling.h"
#include "tandem/dtype.h"

namespace tandem {

template <class S>
struct Key;  // engine/config/section.h

struct ModelConfig {
  int64_t vocab = 257;  ///< byte-level: 256 bytes and kBos
  int64_t hidden = 256;
  int64_t layers = 4;
  int64_t heads = 4;
  int64_t kv_heads = 4;  ///< divides heads (grouped-query attention)
  int64_t head_dim = 64;
  int64_t ffn = 704;
  int64_t max_seq = 512;
  double rope_theta = 10000;
  RopeScaling rope_scaling = {};
  double norm_eps = 1e-5;
  bool tie_word_embeddings = true;
  bool parallel_block = false;  ///< MegaScale §3.1: y = x + MLP(LN(x)) + Attn(LN(x))

  int64_t sliding_window = 0;  ///< keys that a query reads, its own included; 0: all before it
  int64_t full_attention_freq =
      0;  ///< layer i (from 0) reads all keys if (i + 1) % full_attention_freq == 0; 0: none does
  int64_t first_window_layer = 0;  ///< layers before it read all keys

  double rope_local_theta = 0;  ///< rotary base of layers with a window, whose frequencies are not
                                ///< scaled (Gemma 3); 0: as of the others
  int64_t no_rope_layer_interval =
      0;  ///< layer i (from 0) has no rotary embedding if (i + 1) % interval == 0; 0: all have
  int64_t rotary_dim = 0;         ///< first features of a head, which rotate; 0: all
  bool rope_interleaved = false;  ///< adjacent features are a pair, not those head_dim / 2 apart

  bool qkv_bias = false;  ///< q, k and v have biases (Qwen2)
  bool out_bias = false;  ///< and attention's output (Llama's attention_bias)
  bool mlp_bias = false;  ///< gate, up and down have biases
  bool qk_norm = false;   ///< each head of q and k is normalized before its rotation (Qwen3)
  bool qk_norm_all_heads = false;    ///< all heads of q at once, and all of k (OLMo2)
  bool zero_centered_norms = false;  ///< norms multiply by 1 + weight (Gemma)
  std::string norm_position =
      "pre";  ///< norms before branches, "post": of their sums (OLMo2), or "both"
  bool attention_sinks = false;  ///< the denominator of a head's softmax also has e^(a learned
                                 ///< logit) (GPT-OSS)

  // Factors (Granite).
  double embedding_multiplier = 1;  ///< of embeddings
  double residual_multiplier = 1;   ///< of what a branch adds to the residual stream
  double attention_multiplier = 0;  ///< of the products of q and k; 0: 1 / sqrt(head_dim)
  double logits_scaling = 1;        ///< what logits are divided by

  // With a soft cap, x is cap x tanh(x / cap) (Gemma 2); 0: none.
  double attention_softcap = 0;  ///< of the scores of attention
  double logits_softcap = 0;     ///< of logits

  std::string mlp_activation = "silu";  ///< of the gates, or "gelu_pytorch_tanh" (Gemma)
  bool fused_projections = false;  ///< on disk q, k and v are one tensor, gate and up too (Phi-3)

  // Mixture-of-Experts layers replace the MLP with `experts` SwiGLU MLPs; a router chooses top_k of
  // them per token.
  int64_t experts = 0;  ///< 0: every layer is dense
  int64_t top_k = 2;
  int64_t expert_ffn = 0;           ///< width inside an expert; 0: ffn
  int64_t shared_ffn = 0;           ///< width of the shared expert, an MLP that every token takes;
                                    ///< 0: none
  bool shared_expert_gate = false;  ///< its output is multiplied by sigmoid(x . gate) (Qwen2-MoE)
  int64_t moe_layer_freq = 1;  ///< layer i (from 0) has experts if (i + 1) % moe_layer_freq == 0
  std::string router = "softmax";  ///< scores: "softmax" over the experts, or "sigmoid" of each
  bool normalize_top_k = true;     ///< the top-k scores are divided by their sum
  double route_scale = 1;          ///< multiplies the routing weights
  double aux_loss_coeff = 0.01;  ///< coefficient of the load-balancing loss (arXiv 2101.03961, 2.2)
  double router_bias_update_rate =
      0;  ///< above 0: loss-free balancing by a routing bias (arXiv 2408.15664)
  // GPT-OSS.
  bool router_logit_bias = false;  ///< the router's logits have a bias
  bool expert_bias = false;        ///< gate, up and down of experts have biases
  double swiglu_limit = 0;  ///< above 0: experts compute (up + 1) gate sigmoid(alpha gate), gate at
                            ///< most the limit, up clamped to it on both sides; 0: SwiGLU
  double swiglu_alpha = 1.702;
  bool fused_experts = false;  ///< on disk a layer's experts are in four tensors

  /// Sliding window of a layer; 0: none.
  int64_t window(int64_t layer) const {
    const bool is_full = full_attention_freq > 0 && (layer + 1) % full_attention_freq == 0;
    return is_full || layer < first_window_layer ? 0 : sliding_window;
  }
  bool has_rope(int64_t layer) const {
    return no_rope_layer_interval == 0 || (layer + 1) % no_rope_layer_interval != 0;
  }
  int64_t rotary_features() const { return rotary_dim > 0 ? rotary_dim : head_dim; }
  /// The residual stream is kept divided by embedding_multiplier, which changes nothing after its
  /// norms, with this epsilon.
  double stream_eps() const { return norm_eps / (embedding_multiplier * embedding_multiplier); }
  /// Factor of what a branch adds to it.
  double branch_scale() const { return residual_multiplier / embedding_multiplier; }
  float initial_norm() const { return zero_centered_norms ? 0 : 1; }
  bool has_pre_norm() const { return norm_position != "post"; }
  bool has_post_norm() const { return norm_position != "pre"; }
  bool is_moe(int64_t layer) const { return experts > 0 && (layer + 1) % moe_layer_freq == 0; }
  int64_t moe_layers() const { return experts > 0 ? layers / moe_layer_freq : 0; }
  int64_t ffn_per_expert() const { return expert_ffn > 0 ? expert_ffn : ffn; }

  /// Parameters of all experts, which are sharded over EP ranks.
  int64_t expert_parameters() const {
    return moe_layers() * experts * (3 * hidden + (expert_bias ? 2 : 0)) * ffn_per_expert();
  }
  /// Parameters of the whole model.
  int64_t parameters() const;
  /// FLOPs of forward and backward per token at sequence length `seq`, by `flops_formula`.
  double flops_per_token(int64_t seq) const;
  const char* flops_formula() const;
  /// Throws ConfigError naming the invalid key (also against tp: heads, kv_heads; and against ep:
  /// experts). With more TP ranks than key and value heads, tp must be a multiple of kv_heads.
  void check(int tp, int ep = 1) const;
  /// Also throws for what has no backward pass, or none on `tp` ranks.
  void check_training(int tp, int ep = 1) const;
  static std::span<const Key<ModelConfig>> keys();
  bool operator==(const ModelConfig&) const = default;
};

/// Min epsilon added before a division: a smaller one is lost in f32, and 0 / 0 is NaN.
constexpr double kMinEpsilon = 1e-30;

constexpr int32_t kBos = 256;  ///< token before the first byte of every document

/// Writes Hugging Face's `config.json` of the family that computes the same (config_family.h), or
/// of "TandemForCausalLM" if none does. `weights`: dtype of the weights next to it.
std::string to_json(const ModelConfig& config, DType weights = DType::f32);
/// Reads all families, as transformers 4 and 5 write them. Absent keys take their family's default
/// unless they are sizes. Throws ConfigError naming `file`, the key and what is expected for a
/// family, a key or a value that is not understood.
ModelConfig model_config_from_json(const std::string& json, const std::string& file);

}  // namespace tandem
