#include "engine/model/config_experts.h"

#include <fmt/format.h>

#include "engine/model/config_value.h"
#include "tandem/error.h"

namespace tandem {

using Json = nlohmann::ordered_json;

void set_clamped_experts(Json& root, ModelConfig& config) {
  config.qkv_bias = config.out_bias = config.attention_sinks = true;
  config.router_logit_bias = config.expert_bias = config.fused_experts = true;
  config.top_k = 4;
  config.swiglu_limit = 7;
  if (has_value(root, "rope_scaling") || has_value(root, "rope_parameters")) return;
  root["rope_scaling"] = {{"rope_type", "yarn"},
                          {"factor", 32.0},
                          {"original_max_position_embeddings", 4096},
                          {"truncate", false}};
}

void parse_experts(const Json& root, const ModelFamily& family, ModelConfig& config,
                   const std::string& file) {
  const bool is_required = !family.has_all_keys;
  const auto require = [&](const char* key) {
    if (!root.contains(key)) throw ConfigError(fmt::format("{}: key {} is missing", file, key));
  };
  if (is_required) require(family.experts);
  if (!root.contains(family.experts)) return;
  if (family.has_window_switch) {
    require("moe_intermediate_size");
    if (family.has_gated_expert) require("shared_expert_intermediate_size");
  }
  config.normalize_top_k = family.normalizes_top_k;
  for_each_moe_member(family, config, [&]<typename T>(const char* key, T& member) {
    if (root.contains(key)) member = parse_value<T>(root[key], key, file);
  });
  if (config.experts < 1) {
    throw ConfigError(
        fmt::format("{}: {} = {}: expected at least 1", file, family.experts, config.experts));
  }
  if (family.has_clamped_experts || family.has_all_keys) {
    for_each_clamp(config, [&](const char* key, double& member) {
      if (has_value(root, key)) member = parse_value<double>(root[key], key, file);
    });
  }
  if (family.has_clamped_experts && !(config.swiglu_limit > 0)) {
    reject_value(file, "swiglu_limit", config.swiglu_limit, "a number above 0");
  }
}

}  // namespace tandem
