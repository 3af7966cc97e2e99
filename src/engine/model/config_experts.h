// Keys of experts in config.json.
#pragma once

#include <nlohmann/json.hpp>
#include <string>

#include "engine/model/config.h"
#include "engine/model/config_family.h"

namespace tandem {

/// Calls visit(key, member) for the keys of Mixture-of-Experts models: Mixtral's if it has them,
/// then Qwen2-MoE's and DeepSeek's.
template <typename Config, typename Visit>
void for_each_moe_member(const ModelFamily& family, Config& c, const Visit& visit) {
  const bool is_qwen = family.has_window_switch;
  visit(family.experts, c.experts);
  visit("num_experts_per_tok", c.top_k);
  if (family.has_clamped_experts) return visit("router_aux_loss_coef", c.aux_loss_coeff);
  visit("moe_intermediate_size", c.expert_ffn);
  if (!is_qwen || family.has_gated_expert) {
    visit("shared_expert_intermediate_size", c.shared_ffn);
  }
  visit("decoder_sparse_step", c.moe_layer_freq);
  if (!is_qwen) visit("scoring_func", c.router);
  visit("norm_topk_prob", c.normalize_top_k);
  if (!is_qwen) visit("routed_scaling_factor", c.route_scale);
  visit("router_aux_loss_coef", c.aux_loss_coeff);
  if (!is_qwen) visit("router_bias_update_rate", c.router_bias_update_rate);
}

/// Calls visit(key, member) for the keys of GPT-OSS's activation.
template <typename Config, typename Visit>
void for_each_clamp(Config& c, const Visit& visit) {
  visit("swiglu_limit", c.swiglu_limit);
  visit("swiglu_alpha", c.swiglu_alpha);
}

/// Sets the options that all models of GPT-OSS have, and its defaults: also, in `root`, that of
/// rope_scaling.
void set_clamped_experts(nlohmann::ordered_json& root, ModelConfig& config);
/// Parses a family's keys of experts. Throws ConfigError.
void parse_experts(const nlohmann::ordered_json& root, const ModelFamily& family,
                   ModelConfig& config, const std::string& file);

}  // namespace tandem
