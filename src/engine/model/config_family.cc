#include "engine/model/config_family.h"

#include <array>

#include "engine/model/config_functions.h"

namespace tandem {
namespace {

constexpr FixedKey kFixedLlama[] = {{"architectures", "[\"LlamaForCausalLM\"]"},
                                    {"model_type", "\"llama\""},
                                    {"hidden_act", "\"silu\""},
                                    {"attention_dropout", "0.0"},
                                    {"rope_scaling", "null"},
                                    {"pretraining_tp", "1"}};
constexpr FixedKey kFixedMistral[] = {{"architectures", "[\"MistralForCausalLM\"]"},
                                      {"model_type", "\"mistral\""},
                                      {"hidden_act", "\"silu\""},
                                      {"attention_dropout", "0.0"}};
constexpr FixedKey kFixedMixtral[] = {{"architectures", "[\"MixtralForCausalLM\"]"},
                                      {"model_type", "\"mixtral\""},
                                      {"hidden_act", "\"silu\""},
                                      {"attention_dropout", "0.0"},
                                      {"output_router_logits", "false"},
                                      {"router_jitter_noise", "0.0"}};
constexpr FixedKey kFixedQwen2[] = {{"architectures", "[\"Qwen2ForCausalLM\"]"},
                                    {"model_type", "\"qwen2\""},
                                    {"hidden_act", "\"silu\""},
                                    {"attention_dropout", "0.0"},
                                    {"use_mrope", "false"}};
constexpr FixedKey kFixedQwen3[] = {{"architectures", "[\"Qwen3ForCausalLM\"]"},
                                    {"model_type", "\"qwen3\""},
                                    {"hidden_act", "\"silu\""},
                                    {"attention_dropout", "0.0"}};
constexpr FixedKey kFixedQwen2Moe[] = {{"architectures", "[\"Qwen2MoeForCausalLM\"]"},
                                       {"model_type", "\"qwen2_moe\""},
                                       {"hidden_act", "\"silu\""},
                                       {"attention_dropout", "0.0"},
                                       {"qkv_bias", "true"},
                                       {"mlp_only_layers", "[]"},
                                       {"output_router_logits", "false"}};
constexpr FixedKey kFixedQwen3Moe[] = {{"architectures", "[\"Qwen3MoeForCausalLM\"]"},
                                       {"model_type", "\"qwen3_moe\""},
                                       {"hidden_act", "\"silu\""},
                                       {"attention_dropout", "0.0"},
                                       {"mlp_only_layers", "[]"},
                                       {"output_router_logits", "false"}};
constexpr FixedKey kFixedSmolLm3[] = {{"architectures", "[\"SmolLM3ForCausalLM\"]"},
                                      {"model_type", "\"smollm3\""},
                                      {"hidden_act", "\"silu\""},
                                      {"attention_dropout", "0.0"},
                                      {"use_sliding_window", "false"},
                                      {"sliding_window", "null"},
                                      {"eos_token_id", "null"},
                                      {"pad_token_id", "null"}};
constexpr FixedKey kFixedPhi3[] = {{"architectures", "[\"Phi3ForCausalLM\"]"},
                                   {"model_type", "\"phi3\""},
                                   {"hidden_act", "\"silu\""},
                                   {"attention_dropout", "0.0"},
                                   {"embd_pdrop", "0.0"},
                                   {"resid_pdrop", "0.0"},
                                   {"eos_token_id", "null"},
                                   {"pad_token_id", "null"}};
constexpr FixedKey kFixedGranite[] = {{"architectures", "[\"GraniteForCausalLM\"]"},
                                      {"model_type", "\"granite\""},
                                      {"hidden_act", "\"silu\""},
                                      {"attention_dropout", "0.0"},
                                      {"eos_token_id", "null"},
                                      {"pad_token_id", "null"}};
constexpr FixedKey kFixedErnie45[] = {{"architectures", "[\"Ernie4_5ForCausalLM\"]"},
                                      {"model_type", "\"ernie4_5\""},
                                      {"hidden_act", "\"silu\""},
                                      {"eos_token_id", "null"},
                                      {"pad_token_id", "null"}};
constexpr FixedKey kFixedOlmo2[] = {{"architectures", "[\"Olmo2ForCausalLM\"]"},
                                    {"model_type", "\"olmo2\""},
                                    {"hidden_act", "\"silu\""},
                                    {"attention_dropout", "0.0"},
                                    {"eos_token_id", "null"},
                                    {"pad_token_id", "null"}};
constexpr FixedKey kFixedGemma2[] = {{"architectures", "[\"Gemma2ForCausalLM\"]"},
                                     {"model_type", "\"gemma2\""},
                                     {"attention_dropout", "0.0"},
                                     {"eos_token_id", "null"},
                                     {"pad_token_id", "null"}};
constexpr FixedKey kFixedGemma3[] = {{"architectures", "[\"Gemma3ForCausalLM\"]"},
                                     {"model_type", "\"gemma3_text\""},
                                     {"attention_dropout", "0.0"},
                                     {"attn_logit_softcapping", "null"},
                                     {"eos_token_id", "null"},
                                     {"pad_token_id", "null"}};
constexpr GemmaFamily kGemma2Keys{50, 30, 0, 2}, kGemma3Keys{0, 0, 1e4, 6};
constexpr std::string_view kUnusedGemma[] = {"hidden_act"};
constexpr FixedKey kFixedGptOss[] = {{"architectures", "[\"GptOssForCausalLM\"]"},
                                     {"model_type", "\"gpt_oss\""},
                                     {"hidden_act", "\"silu\""},
                                     {"attention_dropout", "0.0"},
                                     {"attention_bias", "true"},
                                     {"output_router_logits", "false"}};
constexpr std::string_view kUnusedGptOss[] = {"experts_per_token", "initial_context_length"};
constexpr std::string_view kUnusedSmolLm3[] = {"pretraining_tp", "max_window_layers"};
constexpr std::string_view kUnusedPhi3[] = {"original_max_position_embeddings"};
/// Values for models that none of these computes, so that no other program reads them as one.
constexpr FixedKey kFixedTandem[] = {{"architectures", "[\"TandemForCausalLM\"]"},
                                     {"model_type", "\"tandem\""}};

constexpr ModelFamily kLlama{.name = "llama",
                             .fixed = kFixedLlama,
                             .experts = nullptr,
                             .rope_theta = 1e4,
                             .aux_loss_coeff = 0.01,
                             .sliding_window = 0,
                             .has_window = false,
                             .has_layer_types = false,
                             .has_window_switch = false,
                             .has_qkv_bias = false,
                             .has_qk_norm = false,
                             .has_qk_norm_all_heads = false,
                             .norm_position = "pre",
                             .has_gated_expert = false,
                             .normalizes_top_k = true,
                             .requires_kv_heads = false,
                             .ties_embeddings = false,
                             .bias_key = "attention_bias",
                             .has_mlp_bias = true,
                             .has_no_rope = false,
                             .has_partial_rotary = false,
                             .has_factors = false,
                             .has_fused_projections = false,
                             .has_interleaved_rope = false,
                             .has_clamped_experts = false,
                             .has_parallel_block = true,
                             .gemma = nullptr,
                             .unused = {},
                             .has_all_keys = false};

constexpr ModelFamily make_mistral() {
  ModelFamily f = kLlama;
  f.name = "mistral", f.fixed = kFixedMistral;
  f.sliding_window = 4096, f.has_window = true;
  f.requires_kv_heads = true;
  f.bias_key = nullptr, f.has_mlp_bias = false;
  return f;
}
constexpr ModelFamily make_mixtral() {
  ModelFamily f = make_mistral();
  f.name = "mixtral", f.fixed = kFixedMixtral;
  f.experts = "num_local_experts";
  f.rope_theta = 1e6, f.aux_loss_coeff = 0.001, f.sliding_window = 0;
  return f;
}
constexpr ModelFamily make_qwen2() {
  ModelFamily f = make_mistral();
  f.name = "qwen2", f.fixed = kFixedQwen2;
  f.has_layer_types = f.has_window_switch = true;
  f.has_qkv_bias = true;
  f.has_parallel_block = false;
  return f;
}
constexpr ModelFamily make_qwen3() {
  ModelFamily f = make_qwen2();
  f.name = "qwen3", f.fixed = kFixedQwen3;
  f.has_qkv_bias = false, f.has_qk_norm = true;
  f.bias_key = "attention_bias";
  return f;
}
constexpr ModelFamily with_experts(ModelFamily f, std::string_view name,
                                   std::span<const FixedKey> fixed) {
  f.name = name, f.fixed = fixed;
  f.experts = "num_experts";
  f.aux_loss_coeff = 0.001, f.normalizes_top_k = false;
  f.has_gated_expert = f.has_qkv_bias;
  return f;
}
constexpr ModelFamily make_smollm3() {
  ModelFamily f = kLlama;
  f.name = "smollm3", f.fixed = kFixedSmolLm3, f.unused = kUnusedSmolLm3;
  f.rope_theta = 2e6;
  f.has_no_rope = f.has_layer_types = f.ties_embeddings = true;
  f.has_parallel_block = false;
  return f;
}
constexpr ModelFamily make_granite() {
  ModelFamily f = kLlama;
  f.name = "granite", f.fixed = kFixedGranite;
  f.has_factors = true;
  f.has_parallel_block = false;
  return f;
}
constexpr ModelFamily make_phi3() {
  ModelFamily f = kLlama;
  f.name = "phi3", f.fixed = kFixedPhi3, f.unused = kUnusedPhi3;
  f.has_window = f.has_partial_rotary = f.has_fused_projections = true;
  f.bias_key = nullptr, f.has_mlp_bias = false;
  f.has_parallel_block = false;
  return f;
}
constexpr ModelFamily make_ernie45() {
  ModelFamily f = kLlama;
  f.name = "ernie4_5", f.fixed = kFixedErnie45;
  f.rope_theta = 5e5;
  f.has_interleaved_rope = f.ties_embeddings = true;
  f.bias_key = "use_bias", f.has_mlp_bias = false;
  f.has_parallel_block = false;
  return f;
}
constexpr ModelFamily make_olmo2() {
  ModelFamily f = kLlama;
  f.name = "olmo2", f.fixed = kFixedOlmo2;
  f.has_qk_norm = f.has_qk_norm_all_heads = true;
  f.norm_position = "post";
  f.has_mlp_bias = f.has_parallel_block = false;
  return f;
}
constexpr ModelFamily make_gemma2() {
  ModelFamily f = kLlama;
  f.name = "gemma2", f.fixed = kFixedGemma2, f.unused = kUnusedGemma, f.gemma = &kGemma2Keys;
  f.norm_position = "both";
  f.sliding_window = 4096, f.has_window = f.has_layer_types = f.ties_embeddings = true;
  f.has_mlp_bias = f.has_parallel_block = false;
  return f;
}
constexpr ModelFamily make_gemma3() {
  ModelFamily f = make_gemma2();
  f.name = "gemma3_text", f.fixed = kFixedGemma3, f.gemma = &kGemma3Keys;
  f.has_qk_norm = true;
  f.rope_theta = 1e6;
  return f;
}
constexpr ModelFamily make_gpt_oss() {
  ModelFamily f = make_mixtral();
  f.name = "gpt_oss", f.fixed = kFixedGptOss, f.unused = kUnusedGptOss;
  f.rope_theta = 150000, f.sliding_window = 128;
  f.has_layer_types = f.has_clamped_experts = true;
  f.has_parallel_block = false;
  return f;
}
constexpr ModelFamily make_tandem() {
  ModelFamily f = make_mixtral();
  f.name = "tandem", f.fixed = kFixedTandem;
  f.rope_theta = 1e4, f.aux_loss_coeff = 0.01;
  f.has_layer_types = f.has_all_keys = true;
  return f;
}

constexpr ModelFamily kMistral = make_mistral(), kMixtral = make_mixtral(), kQwen2 = make_qwen2(),
                      kQwen3 = make_qwen3(),
                      kQwen2Moe = with_experts(kQwen2, "qwen2_moe", kFixedQwen2Moe),
                      kQwen3Moe = with_experts(kQwen3, "qwen3_moe", kFixedQwen3Moe),
                      kSmolLm3 = make_smollm3(), kPhi3 = make_phi3(), kGranite = make_granite(),
                      kErnie45 = make_ernie45(), kOlmo2 = make_olmo2(), kGemma2 = make_gemma2(),
                      kGemma3 = make_gemma3(), kGptOss = make_gpt_oss(), kTandem = make_tandem();
constexpr std::array kFamilies = {
    &kLlama, &kMistral, &kMixtral, &kQwen2, &kQwen3,  &kQwen2Moe, &kQwen3Moe, &kSmolLm3,
    &kPhi3,  &kGranite, &kErnie45, &kOlmo2, &kGemma2, &kGemma3,   &kGptOss,   &kTandem};

const ModelFamily& find_qwen_family(const ModelConfig& c) {
  if (c.mlp_bias || (c.qk_norm && c.qkv_bias != c.out_bias)) return kTandem;
  if (c.experts == 0) return c.qk_norm ? kQwen3 : kQwen2;
  if (c.expert_ffn == 0 || c.out_bias) return kTandem;
  if (c.qkv_bias) return c.shared_expert_gate ? kQwen2Moe : kTandem;
  return c.shared_ffn == 0 && c.sliding_window == 0 ? kQwen3Moe : kTandem;
}

/// Functions of scores, logits and gates that Tandem's own family has.
bool has_functions(const ModelConfig& c, bool counts_sinks = true) {
  return (counts_sinks && c.attention_sinks) || c.attention_softcap > 0 || c.logits_softcap > 0 ||
         c.rope_local_theta > 0 || c.mlp_activation != "silu";
}
bool has_other_norms(const ModelConfig& c) {
  return c.has_post_norm() || c.qk_norm_all_heads || c.zero_centered_norms;
}

/// Families that differ from Llama by these.
bool has_factors(const ModelConfig& c) {
  return c.embedding_multiplier != 1 || c.residual_multiplier != 1 || c.attention_multiplier != 0 ||
         c.logits_scaling != 1;
}
bool is_variant(const ModelConfig& c) {
  return c.no_rope_layer_interval > 0 || c.rotary_dim > 0 || c.rope_interleaved ||
         c.fused_projections || has_factors(c);
}

bool has_expert_options(const ModelConfig& c) {
  return c.router_logit_bias || c.expert_bias || c.swiglu_limit > 0 || c.fused_experts;
}
/// With a softmax router.
bool is_gpt_oss(const ModelConfig& c) {
  const bool has_experts = c.router_logit_bias && c.expert_bias && c.swiglu_limit > 0 &&
                           c.fused_experts && c.normalize_top_k && c.moe_layer_freq == 1 &&
                           c.expert_ffn == 0 && c.shared_ffn == 0;
  return has_experts && c.attention_sinks && c.qkv_bias && c.out_bias && !c.mlp_bias &&
         !c.qk_norm && !is_variant(c) && !has_functions(c, false) && !has_other_norms(c);
}

/// Family of a dense model without norms of q and k.
const ModelFamily& find_variant(const ModelConfig& c) {
  const bool has_other = c.experts > 0 || c.qk_norm || c.first_window_layer > 0,
             has_bias = c.qkv_bias || c.out_bias || c.mlp_bias;
  const int kinds = int(c.no_rope_layer_interval > 0) + int(c.rope_interleaved) +
                    int(c.fused_projections) + int(has_factors(c));
  if (has_other || kinds > 1 || c.qkv_bias != c.out_bias) return kTandem;
  if (c.fused_projections) return has_bias || !c.rope_scaling.is_none() ? kTandem : kPhi3;
  if (c.rotary_dim > 0 || c.sliding_window > 0) return kTandem;
  if (c.rope_interleaved) return c.qkv_bias == c.mlp_bias ? kErnie45 : kTandem;
  if (has_factors(c)) return kGranite;
  return c.no_rope_layer_interval > 0 ? kSmolLm3 : kLlama;
}

/// Whether all but windows and caps is Gemma's.
bool is_gemma(const ModelConfig& c) {
  const bool has_norms = c.zero_centered_norms && c.norm_position == "both" && !c.qk_norm_all_heads,
             has_factors = c.embedding_multiplier == gemma_embedding_multiplier(c.hidden) &&
                           c.residual_multiplier == 1 && c.logits_scaling == 1 &&
                           query_pre_attn_scalar(c) > 0,
             has_other = c.parallel_block || c.experts > 0 || c.mlp_bias || c.attention_sinks ||
                         c.qkv_bias != c.out_bias || c.no_rope_layer_interval > 0 ||
                         c.rotary_dim > 0 || c.rope_interleaved || c.fused_projections;
  return has_norms && has_factors && !has_other;
}
const ModelFamily& find_gemma_family(const ModelConfig& c) {
  if (!c.qk_norm) return c.rope_local_theta == 0 ? kGemma2 : kTandem;
  const bool has_rope = c.rope_local_theta > 0 || c.sliding_window == 0;
  return has_rope && c.attention_softcap == 0 ? kGemma3 : kTandem;
}

/// Norms of other families than OLMo2 are before branches.
const ModelFamily& find_norm_variant(const ModelConfig& c) {
  const bool has_other = is_variant(c) || c.experts > 0 || c.sliding_window > 0 || c.mlp_bias ||
                         c.qkv_bias != c.out_bias || c.zero_centered_norms;
  return c.norm_position == "post" && c.qk_norm_all_heads && !has_other ? kOlmo2 : kTandem;
}

}  // namespace

const ModelFamily& find_family(const ModelConfig& c) {
  const bool has_softmax_router =
      c.router == "softmax" && c.route_scale == 1 && c.router_bias_update_rate == 0;
  if (is_gemma(c)) return find_gemma_family(c);
  if (has_expert_options(c)) return has_softmax_router && is_gpt_oss(c) ? kGptOss : kTandem;
  if (c.parallel_block || has_functions(c) || c.full_attention_freq > 0 ||
      (c.experts > 0 && !has_softmax_router)) {
    return kTandem;
  }
  if (has_other_norms(c)) return find_norm_variant(c);
  if (is_variant(c) || (!c.qk_norm && (c.out_bias || c.mlp_bias))) return find_variant(c);
  if (c.qkv_bias || c.qk_norm) return find_qwen_family(c);
  if (c.first_window_layer > 0 || c.shared_ffn > 0) return kTandem;
  if (c.experts == 0) return c.sliding_window > 0 ? kMistral : kLlama;
  const bool is_mixtral = c.moe_layer_freq == 1 && c.normalize_top_k && c.ffn_per_expert() == c.ffn;
  return is_mixtral ? kMixtral : kTandem;
}

const ModelFamily* find_family(std::string_view model_type) {
  for (const ModelFamily* family : kFamilies) {
    if (family->name == model_type) return family;
  }
  return nullptr;
}

std::string family_names() {
  std::string names;
  for (const ModelFamily* family : kFamilies) {
    if (!names.empty()) names += family == kFamilies.back() ? " or " : ", ";
    names += family->name;
  }
  return names;
}

}  // namespace tandem
