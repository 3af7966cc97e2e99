#include "engine/model/config_family.h"

#include <array>

namespace tandem {
namespace {

constexpr FixedKey kFixedLlama[] = {{"architectures", "[\"LlamaForCausalLM\"]"},
                                    {"model_type", "\"llama\""},
                                    {"hidden_act", "\"silu\""},
                                    {"attention_bias", "false"},
                                    {"mlp_bias", "false"},
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
                                    {"attention_bias", "false"},
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
                                       {"attention_bias", "false"},
                                       {"attention_dropout", "0.0"},
                                       {"mlp_only_layers", "[]"},
                                       {"output_router_logits", "false"}};
/// Values for models that none of these computes, so that no other program reads them as one.
constexpr FixedKey kFixedTandem[] = {{"architectures", "[\"TandemForCausalLM\"]"},
                                     {"model_type", "\"tandem\""},
                                     {"hidden_act", "\"silu\""}};

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
                             .has_gated_expert = false,
                             .normalizes_top_k = true,
                             .requires_kv_heads = false,
                             .has_all_keys = false};

constexpr ModelFamily make_mistral() {
  ModelFamily f = kLlama;
  f.name = "mistral", f.fixed = kFixedMistral;
  f.sliding_window = 4096, f.has_window = true;
  f.requires_kv_heads = true;
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
  return f;
}
constexpr ModelFamily make_qwen3() {
  ModelFamily f = make_qwen2();
  f.name = "qwen3", f.fixed = kFixedQwen3;
  f.has_qkv_bias = false, f.has_qk_norm = true;
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
                      kTandem = make_tandem();
constexpr std::array kFamilies = {&kLlama, &kMistral,  &kMixtral,  &kQwen2,
                                  &kQwen3, &kQwen2Moe, &kQwen3Moe, &kTandem};

const ModelFamily& find_qwen_family(const ModelConfig& c) {
  if (c.qkv_bias && c.qk_norm) return kTandem;
  if (c.experts == 0) return c.qkv_bias ? kQwen2 : kQwen3;
  if (c.expert_ffn == 0) return kTandem;
  if (c.qkv_bias) return c.shared_expert_gate ? kQwen2Moe : kTandem;
  return c.shared_ffn == 0 && c.sliding_window == 0 ? kQwen3Moe : kTandem;
}

}  // namespace

const ModelFamily& find_family(const ModelConfig& c) {
  const bool has_softmax_router =
      c.router == "softmax" && c.route_scale == 1 && c.router_bias_update_rate == 0;
  if (c.parallel_block || c.full_attention_freq > 0 || (c.experts > 0 && !has_softmax_router)) {
    return kTandem;
  }
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
