#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <nlohmann/json.hpp>
#include <string_view>
#include <utility>
#include <vector>

#include "core/system/json.h"
#include "core/system/nearest.h"
#include "core/system/printable.h"
#include "engine/model/config.h"
#include "engine/model/config_effect.h"
#include "engine/model/config_experts.h"
#include "engine/model/config_family.h"
#include "engine/model/config_functions.h"
#include "engine/model/config_rope.h"
#include "engine/model/config_value.h"
#include "engine/model/weight_quantization.h"
#include "tandem/error.h"

namespace tandem {
namespace {

using Json = nlohmann::ordered_json;
constexpr const char* kWindow = "sliding_window";
constexpr const char* kWindowSwitch = "use_sliding_window";
constexpr const char* kFirstWindowLayer = "max_window_layers";
constexpr const char* kLayerTypes = "layer_types";
constexpr const char* kFullAttention = "full_attention";
constexpr const char* kSlidingAttention = "sliding_attention";
constexpr const char* kPartialRotary = "partial_rotary_factor";
constexpr const char* kMlpBias = "mlp_bias";
constexpr const char* kKvHeads = "num_key_value_heads";

/// Calls visit(key, member) for every key with a member in ModelConfig.
template <typename Config, typename Visit>
void for_each_member(Config& c, const Visit& visit) {
  visit("vocab_size", c.vocab);
  visit("hidden_size", c.hidden);
  visit("num_hidden_layers", c.layers);
  visit("num_attention_heads", c.heads);
  visit(kKvHeads, c.kv_heads);
  visit("head_dim", c.head_dim);
  visit("intermediate_size", c.ffn);
  visit("max_position_embeddings", c.max_seq);
  visit("rope_theta", c.rope_theta);
  visit("rms_norm_eps", c.norm_eps);
  visit("tie_word_embeddings", c.tie_word_embeddings);
  visit("parallel_block", c.parallel_block);
}

/// Calls visit(key, member) for Granite's factors.
template <typename Config, typename Visit>
void for_each_factor(Config& c, const Visit& visit) {
  visit("embedding_multiplier", c.embedding_multiplier);
  visit("residual_multiplier", c.residual_multiplier);
  visit("attention_multiplier", c.attention_multiplier);
  visit("logits_scaling", c.logits_scaling);
}

/// Calls visit(key, member) for options that the other families have in all models or in none.
template <typename Config, typename Visit>
void for_each_tandem_member(Config& c, const Visit& visit) {
  visit("qkv_bias", c.qkv_bias);
  visit("out_bias", c.out_bias);
  visit(kMlpBias, c.mlp_bias);
  for_each_function(c, visit);
  visit(kNoRopeInterval, c.no_rope_layer_interval);
  visit("rotary_dim", c.rotary_dim);
  visit("rope_interleaved", c.rope_interleaved);
  visit("fused_projections", c.fused_projections);
  visit("qk_norm", c.qk_norm);
  visit("attention_sinks", c.attention_sinks);
  visit("qk_norm_all_heads", c.qk_norm_all_heads);
  visit("norm_position", c.norm_position);
  visit("zero_centered_norms", c.zero_centered_norms);
  visit("shared_expert_gate", c.shared_expert_gate);
  visit(kFirstWindowLayer, c.first_window_layer);
  visit("router_logit_bias", c.router_logit_bias);
  visit("expert_bias", c.expert_bias);
  visit("fused_experts", c.fused_experts);
}

const ModelFamily& require_family(const Json& root, const std::string& file) {
  if (root.contains("kv_lora_rank") && !root["kv_lora_rank"].is_null()) {  // DeepSeek-V2
    reject_value(file, "kv_lora_rank", root["kv_lora_rank"],
                 "none, as multi-head latent attention is not supported");
  }
  if (!root.contains("model_type")) {
    throw ConfigError(
        fmt::format("{}: key model_type is missing: expected {}", file, family_names()));
  }
  const Json& type = root["model_type"];
  if (type.is_string()) {
    if (const ModelFamily* const family = find_family(type.get<std::string>())) return *family;
  }
  reject_value(file, "model_type", type, family_names());
}

/// Keys that may be absent or null (head_dim: hidden / heads).
constexpr std::array<std::string_view, 4> kOptional = {"head_dim", "parallel_block", "rope_theta",
                                                       "tie_word_embeddings"};
/// Keys of all families that are parsed by parse_rope.
constexpr std::array<std::string_view, 2> kRope = {"rope_parameters", "rope_scaling"};

template <size_t N>
bool contains(const std::array<std::string_view, N>& keys, std::string_view key) {
  return std::ranges::find(keys, key) != keys.end();
}

/// Keys of a family whose value is read.
std::vector<std::string> known_keys(const ModelFamily& family) {
  ModelConfig any;
  std::vector<std::string> names(kRope.begin(), kRope.end());
  const auto add = [&](const char* key, auto&) { names.emplace_back(key); };
  for_each_member(any, add);
  if (family.experts) for_each_moe_member(family, any, add);
  if (family.has_all_keys) {
    for_each_tandem_member(any, add);
    names.emplace_back(kActivation);
  }
  if (family.has_factors || family.has_all_keys) for_each_factor(any, add);
  if (family.gemma) for_each_gemma_key(*family.gemma, [&](const char* key) { add(key, key); });
  if (family.has_clamped_experts || family.has_all_keys) for_each_clamp(any, add);
  if (family.bias_key) names.emplace_back(family.bias_key);
  if (family.has_mlp_bias) names.emplace_back(kMlpBias);
  if (family.has_no_rope) names.insert(names.end(), {kNoRopeLayers, kNoRopeInterval});
  if (family.has_partial_rotary) names.emplace_back(kPartialRotary);
  if (family.has_window) names.emplace_back(kWindow);
  if (family.has_layer_types) names.emplace_back(kLayerTypes);
  if (family.has_window_switch) names.insert(names.end(), {kWindowSwitch, kFirstWindowLayer});
  return names;
}

/// transformers 5 calls the number of experts of all families num_local_experts.
void rename_experts(const ModelFamily& family, Json& root) {
  constexpr const char* kOther = "num_local_experts";
  if (!family.experts || root.contains(family.experts) || !root.contains(kOther)) return;
  root[family.experts] = root[kOther];
  root.erase(kOther);
}

/// Whether a fixed key has its only value, or one that means the same.
bool is_same(const FixedKey& fixed, const Json& value) {
  if (value == Json::parse(fixed.value)) return true;
  const std::string_view key = fixed.key;
  return (key == "hidden_act" && value == "swish") || (key == "architectures" && value.is_null());
}

/// Throws for a key with an effect that is not known. `unused` receives those without one.
void check_known(const Json& root, const ModelFamily& family, const std::string& file,
                 std::vector<std::string>& unused) {
  const std::vector<std::string> names = known_keys(family);
  for (const auto& [key, value] : root.items()) {
    if (std::ranges::find(names, key) != names.end()) continue;
    if (key == kQuantizationKey && !value.is_null()) {
      parse_weight_quantization(value, file, unused);
      continue;
    }
    const auto fixed =
        std::ranges::find_if(family.fixed, [&](const FixedKey& each) { return key == each.key; });
    const bool is_fixed = fixed != family.fixed.end();
    if (std::ranges::find(family.unused, key) != family.unused.end()) continue;
    if (is_fixed && is_same(*fixed, value)) continue;
    if (has_no_effect(key, value, is_fixed)) {
      if (!is_bookkeeping(key)) unused.push_back(printable(key));
      continue;
    }
    if (is_fixed) reject_value(file, key, value, fixed->value);
    const std::string close = nearest(key, names);
    throw ConfigError(fmt::format("{}: unknown key {}{}", file, printable(key),
                                  close.empty() ? "" : ": nearest valid key is " + close));
  }
}

const char* layer_type(const ModelConfig& config, int64_t layer) {
  return config.window(layer) > 0 ? kSlidingAttention : kFullAttention;
}

/// Whether layer_types are those of `config`.
bool has_layer_types(const Json& types, const ModelConfig& config) {
  for (int64_t i = 0; i < config.layers; ++i) {
    if (types[size_t(i)] != layer_type(config, i)) return false;
  }
  return true;
}

/// Sets the layers that have a window, which replaces what max_window_layers says.
void parse_layer_types(const Json& types, ModelConfig& config, const std::string& file) {
  const auto reject = [&](const std::string& expected) {
    reject_value(file, kLayerTypes, types, expected);
  };
  if (!types.is_array() || int64_t(types.size()) != config.layers) {
    reject(fmt::format("an array of num_hidden_layers = {} strings", config.layers));
  }
  int64_t first_full = -1, first_sliding = -1;
  for (int64_t i = 0; i < config.layers; ++i) {
    const Json& type = types[size_t(i)];
    if (type != kFullAttention && type != kSlidingAttention) {
      reject(fmt::format("of \"{}\" and \"{}\"", kFullAttention, kSlidingAttention));
    }
    int64_t& first = type == kFullAttention ? first_full : first_sliding;
    if (first < 0) first = i;
  }
  config.full_attention_freq = config.first_window_layer = 0;
  if (first_sliding < 0) config.sliding_window = 0;
  if (config.sliding_window == 0) {
    if (first_sliding >= 0) reject(fmt::format("{} with \"{}\"", kWindow, kSlidingAttention));
    return;
  }
  if (first_full < 0) return;
  config.first_window_layer = first_full == 0 ? first_sliding : 0;
  config.full_attention_freq = first_full == 0 ? 0 : first_full + 1;
  if (!has_layer_types(types, config)) {
    reject(
        fmt::format("\"{}\" in every n-th layer, in the first ones, or in none", kFullAttention));
  }
}

/// Parses max_window_layers of Qwen2 and Qwen3.
void parse_first_window_layer(const Json& root, ModelConfig& config, const std::string& file) {
  constexpr int64_t kDefault = 28;
  int64_t first = root.contains(kFirstWindowLayer)
                      ? parse_value<int64_t>(root[kFirstWindowLayer], kFirstWindowLayer, file)
                      : kDefault;
  if (first < 0) reject_value(file, kFirstWindowLayer, first, "0 or more");
  if (first >= config.layers) first = config.sliding_window = 0;  // no layer has a window
  config.first_window_layer = first;
}

void parse_window(const Json& root, const ModelFamily& family, ModelConfig& config,
                  const std::string& file) {
  config.sliding_window = family.sliding_window;
  if (family.has_window && root.contains(kWindow)) {
    const Json& window = root[kWindow];
    config.sliding_window = window.is_null() ? 0 : parse_value<int64_t>(window, kWindow, file);
  }
  const bool is_on =
      !family.has_window_switch ||
      (root.contains(kWindowSwitch) && parse_value<bool>(root[kWindowSwitch], kWindowSwitch, file));
  if (!is_on) config.sliding_window = 0;
  const bool is_given = root.contains(kWindow) && !root[kWindow].is_null();
  if (is_on && is_given && config.sliding_window < 1) {
    reject_value(file, kWindow, root[kWindow], "null or at least 1");
  }
  if (family.has_window_switch && config.sliding_window > 0) {
    parse_first_window_layer(root, config, file);
  }
  if (family.has_layer_types && root.contains(kLayerTypes) && !root[kLayerTypes].is_null()) {
    parse_layer_types(root[kLayerTypes], config, file);
  } else if (family.has_clamped_experts && config.sliding_window > 0 && config.layers > 1) {
    config.full_attention_freq = 2;
  }
}

void parse_biases(const Json& root, const ModelFamily& family, ModelConfig& config,
                  const std::string& file) {
  const auto parse = [&](const char* key) {
    return has_value(root, key) && parse_value<bool>(root[key], key, file);
  };
  if (family.bias_key && parse(family.bias_key)) config.qkv_bias = config.out_bias = true;
  if (family.bias_key && !family.has_mlp_bias && !family.has_qk_norm && !family.gemma) {
    config.mlp_bias = config.out_bias;
  }
  if (family.has_mlp_bias) config.mlp_bias = parse(kMlpBias);
}

/// Factor of the products of q and k without attention_multiplier.
double default_attention(const ModelConfig& c) {
  return 1 / std::sqrt(double(c.head_dim));
}

void parse_factors(const Json& root, ModelConfig& config, const std::string& file) {
  for_each_factor(config, [&]<typename T>(const char* key, T& member) {
    if (!has_value(root, key)) return;
    member = parse_value<T>(root[key], key, file);
    if (!(member > 0)) reject_value(file, key, root[key], "a number above 0");
  });
  if (config.attention_multiplier == default_attention(config)) config.attention_multiplier = 0;
}

void parse_members(const Json& root, const ModelFamily& family, ModelConfig& config,
                   const std::string& file) {
  const auto is_set = [&](const char* key) { return has_value(root, key); };
  for_each_member(config, [&]<typename T>(const char* key, T& member) {
    bool optional = contains(kOptional, key);
    if (key == std::string_view(kKvHeads)) optional = !family.requires_kv_heads;
    if (key == std::string_view("head_dim")) {
      optional = (!family.has_qk_norm || family.has_qk_norm_all_heads) && !family.gemma &&
                 !family.has_clamped_experts;
    }
    if (is_set(key) || (!optional && root.contains(key))) {
      member = parse_value<T>(root[key], key, file);
    } else if (!optional) {
      throw ConfigError(fmt::format("{}: key {} is missing", file, key));
    }
  });
  if (!is_set(kKvHeads)) config.kv_heads = config.heads;
  if (is_set("head_dim") || config.heads < 1) return;
  if (config.hidden % config.heads != 0) {
    throw ConfigError(fmt::format(
        "{}: no head_dim, and hidden_size = {} is no multiple of num_attention_heads = {}", file,
        config.hidden, config.heads));
  }
  config.head_dim = config.hidden / config.heads;
}

}  // namespace

namespace {

/// Keys of biases, rotation and factors.
void write_variants(const ModelConfig& c, const ModelFamily& family, Json& root) {
  if (family.bias_key) root[family.bias_key] = c.out_bias;
  if (family.has_mlp_bias) root[kMlpBias] = c.mlp_bias;
  if (family.has_no_rope) {
    root[kNoRopeInterval] = c.no_rope_layer_interval;
    for (int64_t i = 0; i < c.layers; ++i) root[kNoRopeLayers].push_back(int(c.has_rope(i)));
  }
  if (family.has_partial_rotary && c.rotary_dim > 0) {
    double share = double(c.rotary_dim) / double(c.head_dim);
    while (int64_t(share * double(c.head_dim)) < c.rotary_dim) share = std::nextafter(share, 1);
    root[kPartialRotary] = share;
  }
  if (family.has_factors) {
    for_each_factor(c, [&](const char* key, double value) { root[key] = value; });
    if (c.attention_multiplier == 0) {
      root["attention_multiplier"] = default_attention(c);
    }
  }
}

/// Keys of windows.
void write_window(const ModelConfig& c, const ModelFamily& family, Json& root) {
  if (c.sliding_window > 0) {
    root[kWindow] = c.sliding_window;
  } else if (family.has_clamped_experts) {
    root[kWindow] = family.sliding_window;  // of no layer
  } else if (family.has_window) {
    root[kWindow] = nullptr;
  }
  if (family.has_window_switch) {
    root[kWindowSwitch] = c.sliding_window > 0;
    root[kFirstWindowLayer] = c.first_window_layer;
  }
}

}  // namespace

std::string to_json(const ModelConfig& config, DType weights) {
  Json root;
  const bool moe = config.experts > 0;
  const ModelFamily& family = find_family(config);
  for (const FixedKey& fixed : family.fixed) root[fixed.key] = Json::parse(fixed.value);
  const auto write = [&](const char* key, const auto& value) { root[key] = value; };
  for_each_member(config, write);
  if (!family.has_parallel_block) root.erase("parallel_block");
  write_variants(config, family, root);
  if (moe) for_each_moe_member(family, config, write);
  write_window(config, family, root);
  if (config.swiglu_limit > 0) for_each_clamp(config, write);
  if (!config.rope_scaling.is_none()) {
    root["rope_scaling"] = rope_scaling_json(config.rope_scaling);
  } else if (family.has_clamped_experts) {
    root["rope_scaling"] = {{"rope_type", "default"}};
  }
  if (family.has_all_keys) {
    const ModelConfig usual;
    Json defaults;
    const auto read_default = [&](const char* key, const auto& value) { defaults[key] = value; };
    const auto write_other = [&](const char* key, const auto& value) {
      if (defaults[key] != Json(value)) root[key] = value;
    };
    for_each_tandem_member(usual, read_default), for_each_factor(usual, read_default);
    for_each_tandem_member(config, write_other), for_each_factor(config, write_other);
    root[kActivation] = config.mlp_activation;
  }
  if (family.gemma) write_gemma(config, root);
  if ((config.full_attention_freq > 0 && !family.gemma) || family.has_clamped_experts) {
    for (int64_t i = 0; i < config.layers; ++i) root[kLayerTypes].push_back(layer_type(config, i));
  }
  root["bos_token_id"] = config.vocab == kBos + 1 ? Json(kBos) : Json();  // as the tokenizer says
  root["torch_dtype"] = weights == DType::bf16 ? "bfloat16" : "float32";
  return dump_json(root, 2) + "\n";
}

ModelConfig model_config_from_json(const std::string& json, const std::string& file) {
  std::vector<std::string> unused;
  return model_config_from_json(json, file, unused);
}

ModelConfig model_config_from_json(const std::string& json, const std::string& file,
                                   std::vector<std::string>& unused) {
  Json root = parse_json<Json>(json);
  if (root.is_discarded()) {
    throw ConfigError(
        fmt::format("{}: not JSON, or nested more than {} deep", file, kMaxJsonDepth));
  }
  if (!root.is_object()) throw ConfigError(file + ": expected a JSON object");
  const ModelFamily& family = require_family(root, file);
  rename_experts(family, root);
  check_known(root, family, file, unused);
  ModelConfig config;
  config.tie_word_embeddings = family.ties_embeddings;
  config.rope_theta = family.rope_theta;
  config.aux_loss_coeff = family.aux_loss_coeff;
  config.qkv_bias = family.has_qkv_bias;
  config.qk_norm = family.has_qk_norm;
  config.qk_norm_all_heads = family.has_qk_norm_all_heads;
  config.norm_position = family.norm_position;
  config.shared_expert_gate = family.has_gated_expert;
  config.fused_projections = family.has_fused_projections;
  config.rope_interleaved = family.has_interleaved_rope;
  if (family.has_factors) config.attention_multiplier = 1;
  if (family.has_clamped_experts) set_clamped_experts(root, config);
  parse_members(root, family, config, file);
  if (family.experts) parse_experts(root, family, config, file);
  if (family.has_all_keys) {
    for_each_tandem_member(config, [&]<typename T>(const char* key, T& member) {
      if (root.contains(key)) member = parse_value<T>(root[key], key, file);
    });
  }
  if (family.has_all_keys) parse_activation(root, kActivation, file, config);
  if (family.gemma) parse_gemma(root, *family.gemma, file, config);
  parse_biases(root, family, config, file);
  if (family.has_factors || family.has_all_keys) parse_factors(root, config, file);
  try {
    // Both need a window.
    const double local_theta = std::exchange(config.rope_local_theta, 0);
    const int64_t first_window = std::exchange(config.first_window_layer, 0);
    config.check(1);  // before lists of num_hidden_layers are made
    parse_window(root, family, config, file);
    config.rope_local_theta = local_theta;
    if (first_window > 0 && !has_value(root, kLayerTypes)) config.first_window_layer = first_window;
    if (family.gemma) parse_gemma_layers(root, *family.gemma, file, config);
    if (family.has_no_rope) parse_no_rope(root, file, config);
    parse_rope(root, file, family.has_partial_rotary, config);
    if (family.has_fused_projections && !config.rope_scaling.is_none()) {
      reject_value(file, "rope_scaling", config.rope_scaling.type,
                   fmt::format("none for {}", family.name));
    }
    config.check(1);
  } catch (const ConfigError& error) {
    const std::string text = error.what();
    throw ConfigError(text.starts_with(file) ? text : fmt::format("{}: {}", file, text));
  }
  if (family.name == "qwen3_moe" && config.sliding_window > 0) {
    reject_value(file, kWindowSwitch, true, "false for qwen3_moe");
  }
  return config;
}

}  // namespace tandem
