#include "engine/config/section.h"
#include "engine/model/config.h"

namespace tandem {
namespace {

constexpr double kMinRatio = 1e-6, kMaxRatio = 1e9;

/// Slot of a key that scales rotary frequencies.
template <auto member>
ConfigSlot rope(ModelConfig& model) {
  return &(model.rope_scaling.*member);
}

constexpr Key<ModelConfig> kModelKeys[] = {
    {"vocab", &ModelConfig::vocab, Range(257, 1 << 24), "tokens (257: bytes and start)"},
    {"hidden", &ModelConfig::hidden, Range(1, 1 << 20), "width of the residual stream"},
    {"layers", &ModelConfig::layers, Range(1, 4096), "decoder layers"},
    {"heads", &ModelConfig::heads, Range(1, 4096), "query heads"},
    {"kv_heads", &ModelConfig::kv_heads, Range(1, 4096), "key and value heads"},
    {"head_dim", &ModelConfig::head_dim, Range(2, 4096), "features per head"},
    {"ffn", &ModelConfig::ffn, Range(1, 1 << 22), "width inside the MLP"},
    {"max_seq", &ModelConfig::max_seq, Range(1, 1 << 24), "longest sequence"},
    {"rope_theta", &ModelConfig::rope_theta, Range(1, kBig), "rotary base"},
    {"rope_type", rope<&RopeScaling::type>,
     one_of("default", "linear", "dynamic", "llama3", "yarn"),
     "scaling of rotary frequencies, as rope_scaling of Hugging Face"},
    {"rope_factor", rope<&RopeScaling::factor>, Range(1, kMaxRatio),
     "what a scaling divides frequencies by"},
    {"rope_original_max_seq", rope<&RopeScaling::original_max_seq>, Range(0, kMaxRatio),
     "llama3, yarn: longest sequence before the scaling"},
    {"rope_low_freq_factor", rope<&RopeScaling::low_freq_factor>, Range(kMinRatio, kMaxRatio),
     "llama3: wavelengths in that sequence below which all is scaled"},
    {"rope_high_freq_factor", rope<&RopeScaling::high_freq_factor>, Range(kMinRatio, kMaxRatio),
     "llama3: wavelengths in that sequence above which nothing is scaled"},
    {"rope_beta_fast", rope<&RopeScaling::beta_fast>, Range(kMinRatio, kMaxRatio),
     "yarn: rotations in that sequence above which nothing is scaled"},
    {"rope_beta_slow", rope<&RopeScaling::beta_slow>, Range(kMinRatio, kMaxRatio),
     "yarn: rotations in that sequence below which all is scaled"},
    {"rope_truncate", rope<&RopeScaling::truncate>, kAny,
     "yarn: the ramp between these begins and ends at whole pairs"},
    {"rope_attention_factor", rope<&RopeScaling::attention_factor>, Range(kMinRatio, kMaxRatio),
     "yarn: factor of cosines and sines"},
    {"norm_eps", &ModelConfig::norm_eps, Range(kMinEpsilon, 1), "RMSNorm epsilon"},
    {"tie_word_embeddings", &ModelConfig::tie_word_embeddings, kAny, "head shares the embedding"},
    {"parallel_block", &ModelConfig::parallel_block, kAny,
     "attention and MLP side by side (MegaScale)"},
    {"sliding_window", &ModelConfig::sliding_window, Range(0, 1 << 24),
     "tokens that a query attends to, its own and those just before it (0: all)"},
    {"full_attention_freq", &ModelConfig::full_attention_freq, Range(0, 4096),
     "of so many layers the last attends to all tokens (0: all layers have the window)"},
    {"first_window_layer", &ModelConfig::first_window_layer, Range(0, 4096),
     "layers before this one attend to all tokens before (with model.sliding_window)"},
    {"no_rope_layer_interval", &ModelConfig::no_rope_layer_interval, Range(0, 4096),
     "of so many layers the last has no rotary embedding (0: all have; SmolLM3: 4)"},
    {"rotary_dim", &ModelConfig::rotary_dim, Range(0, 4096),
     "first features of a head, which rotate (0: all; Phi-3)"},
    {"rope_interleaved", &ModelConfig::rope_interleaved, kAny,
     "adjacent features are a rotary pair (Ernie 4.5), not those half a head apart"},
    {"qkv_bias", &ModelConfig::qkv_bias, kAny, "q, k and v have biases (Qwen2)"},
    {"out_bias", &ModelConfig::out_bias, kAny,
     "attention's output has a bias (Llama's attention_bias: with model.qkv_bias)"},
    {"mlp_bias", &ModelConfig::mlp_bias, kAny, "gate, up and down have biases"},
    {"qk_norm", &ModelConfig::qk_norm, kAny, "norms of q's and k's heads (Qwen3)"},
    {"attention_sinks", &ModelConfig::attention_sinks, kAny,
     "a head's softmax also has a learned logit without a value (GPT-OSS)"},
    {"embedding_multiplier", &ModelConfig::embedding_multiplier, Range(1e-6, 1e6),
     "factor of embeddings (Granite)"},
    {"residual_multiplier", &ModelConfig::residual_multiplier, Range(1e-6, 1e6),
     "factor of what a branch adds to the residual stream (Granite)"},
    {"attention_multiplier", &ModelConfig::attention_multiplier, Range(0, 1e6),
     "factor of the products of q and k (0: 1 / sqrt(head_dim); Granite)"},
    {"logits_scaling", &ModelConfig::logits_scaling, Range(1e-6, 1e6),
     "what logits are divided by (Granite)"},
    {"fused_projections", &ModelConfig::fused_projections, kAny,
     "q, k and v are one tensor in final/, gate and up another (Phi-3)"},
    {"experts", &ModelConfig::experts, Range(0, 1 << 16), "experts of a layer (0: dense)"},
    {"top_k", &ModelConfig::top_k, Range(1, 1 << 16), "experts that a token goes to"},
    {"expert_ffn", &ModelConfig::expert_ffn, Range(0, 1 << 22),
     "width inside an expert (0: model.ffn)"},
    {"shared_ffn", &ModelConfig::shared_ffn, Range(0, 1 << 22),
     "width of an MLP that all tokens take in addition to experts (0: none)"},
    {"shared_expert_gate", &ModelConfig::shared_expert_gate, kAny,
     "the output of model.shared_ffn has a gate for each token (Qwen2-MoE)"},
    {"moe_layer_freq", &ModelConfig::moe_layer_freq, Range(1, 4096),
     "of so many layers the last has experts, the others an MLP"},
    {"router", &ModelConfig::router, one_of("softmax", "sigmoid"), "scores of the experts"},
    {"normalize_top_k", &ModelConfig::normalize_top_k, kAny,
     "weights of a token's experts add up to model.route_scale"},
    {"route_scale", &ModelConfig::route_scale, Range(1e-6, 1e6), "factor of the weights"},
    {"aux_loss_coeff", &ModelConfig::aux_loss_coeff, Range(0, 1e3),
     "coefficient of the load-balancing loss (train.aux_loss_scope)"},
    {"router_bias_update_rate", &ModelConfig::router_bias_update_rate, Range(0, 1),
     "loss-free balancing: what a step moves the routers' biases by (0: none)"},
    {"router_logit_bias", &ModelConfig::router_logit_bias, kAny,
     "the router's logits have a bias (GPT-OSS)"},
    {"expert_bias", &ModelConfig::expert_bias, kAny,
     "gate, up and down of experts have biases (GPT-OSS)"},
    {"swiglu_limit", &ModelConfig::swiglu_limit, Range(0, 1e6),
     "experts' gate and up are clamped to it, and up + 1 is a factor (0: SwiGLU; GPT-OSS: 7)"},
    {"swiglu_alpha", &ModelConfig::swiglu_alpha, Range(1e-6, 1e6),
     "with model.swiglu_limit, gate's factor in its sigmoid"},
    {"fused_experts", &ModelConfig::fused_experts, kAny,
     "experts of a layer are fused tensors in final/ (GPT-OSS)"},
};

}  // namespace

std::span<const Key<ModelConfig>> ModelConfig::keys() {
  return kModelKeys;
}

}  // namespace tandem
