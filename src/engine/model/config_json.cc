#include <fmt/format.h>

#include <array>
#include <limits>
#include <nlohmann/json.hpp>
#include <span>
#include <string_view>
#include <type_traits>
#include <vector>

#include "core/json.h"
#include "core/nearest.h"
#include "core/printable.h"
#include "engine/model/config.h"
#include "tandem/error.h"

namespace tandem {
namespace {

using Json = nlohmann::ordered_json;
constexpr const char* kExperts = "num_local_experts";
constexpr const char* kWindow = "sliding_window";
constexpr const char* kLayerTypes = "layer_types";
constexpr const char* kFullAttention = "full_attention";
constexpr const char* kSlidingAttention = "sliding_attention";

/// Calls visit(key, member) for every key with a member in ModelConfig.
template <typename Config, typename Visit>
void for_each_member(Config& c, const Visit& visit) {
  visit("vocab_size", c.vocab);
  visit("hidden_size", c.hidden);
  visit("num_hidden_layers", c.layers);
  visit("num_attention_heads", c.heads);
  visit("num_key_value_heads", c.kv_heads);
  visit("head_dim", c.head_dim);
  visit("intermediate_size", c.ffn);
  visit("max_position_embeddings", c.max_seq);
  visit("rope_theta", c.rope_theta);
  visit("rms_norm_eps", c.norm_eps);
  visit("tie_word_embeddings", c.tie_word_embeddings);
  visit("parallel_block", c.parallel_block);
}

/// Calls visit(key, member) for the keys of Mixture-of-Experts models: Mixtral's if it has them,
/// then Qwen2-MoE's and DeepSeek's.
template <typename Config, typename Visit>
void for_each_moe_member(Config& c, const Visit& visit) {
  visit(kExperts, c.experts);
  visit("num_experts_per_tok", c.top_k);
  visit("moe_intermediate_size", c.expert_ffn);
  visit("shared_expert_intermediate_size", c.shared_ffn);
  visit("decoder_sparse_step", c.moe_layer_freq);
  visit("scoring_func", c.router);
  visit("norm_topk_prob", c.normalize_top_k);
  visit("routed_scaling_factor", c.route_scale);
  visit("router_aux_loss_coef", c.aux_loss_coeff);
  visit("router_bias_update_rate", c.router_bias_update_rate);
}

/// Keys of Llama checkpoints whose value must match this model.
struct Fixed {
  const char* key;
  const char* value;  ///< JSON
};
constexpr Fixed kFixed[] = {{"architectures", "[\"LlamaForCausalLM\"]"},
                            {"model_type", "\"llama\""},
                            {"hidden_act", "\"silu\""},
                            {"attention_bias", "false"},
                            {"mlp_bias", "false"},
                            {"attention_dropout", "0.0"},
                            {"rope_scaling", "null"},
                            {"pretraining_tp", "1"}};
/// Required values of Mistral.
constexpr Fixed kFixedMistral[] = {{"architectures", "[\"MistralForCausalLM\"]"},
                                   {"model_type", "\"mistral\""},
                                   {"hidden_act", "\"silu\""},
                                   {"attention_dropout", "0.0"}};
/// Required values of Mixtral.
constexpr Fixed kFixedMixtral[] = {{"architectures", "[\"MixtralForCausalLM\"]"},
                                   {"model_type", "\"mixtral\""},
                                   {"hidden_act", "\"silu\""},
                                   {"attention_dropout", "0.0"},
                                   {"output_router_logits", "false"},
                                   {"router_jitter_noise", "0.0"}};

/// Values for models that neither computes, so that no other program reads them as one of those.
constexpr Fixed kFixedTandem[] = {{"architectures", "[\"TandemForCausalLM\"]"},
                                  {"model_type", "\"tandem\""},
                                  {"hidden_act", "\"silu\""}};

/// Model type: its keys, and its defaults for absent ones.
struct Format {
  std::string_view name;  ///< model_type
  std::span<const Fixed> fixed;
  double rope_theta, aux_loss_coeff;
  int64_t sliding_window;
  bool has_window, has_layer_types, has_experts;  ///< keys
};
constexpr Format kLlama{"llama", kFixed, 1e4, 0.01, 0, false, false, false};
constexpr Format kMistral{"mistral", kFixedMistral, 1e4, 0.01, 4096, true, false, false};
constexpr Format kMixtral{"mixtral", kFixedMixtral, 1e6, 0.001, 0, true, false, true};
constexpr Format kTandem{"tandem", kFixedTandem, 1e4, 0.01, 0, true, true, true};
constexpr const Format* kFormats[] = {&kLlama, &kMistral, &kMixtral, &kTandem};
constexpr const char* kFormatNames = "llama, mistral, mixtral or tandem";

/// Model type whose implementations compute the same as `c`.
const Format& find_format(const ModelConfig& c) {
  if (c.parallel_block || c.full_attention_freq > 0) return kTandem;
  if (c.experts == 0) return c.sliding_window > 0 ? kMistral : kLlama;
  const bool is_mixtral = c.moe_layer_freq == 1 && c.shared_ffn == 0 && c.router == "softmax" &&
                          c.normalize_top_k && c.route_scale == 1 &&
                          c.router_bias_update_rate == 0 && c.ffn_per_expert() == c.ffn;
  return is_mixtral ? kMixtral : kTandem;
}

const Format& find_format(const Json& root, const std::string& file) {
  if (!root.contains("model_type")) {
    throw ConfigError(
        fmt::format("{}: key model_type is missing: expected {}", file, kFormatNames));
  }
  for (const Format* format : kFormats) {
    if (root["model_type"] == format->name) return *format;
  }
  throw ConfigError(fmt::format("{}: model_type = {}: expected {}", file,
                                printable(root["model_type"].dump()), kFormatNames));
}

/// Keys without effect here.
constexpr std::array<std::string_view, 9> kIgnored = {
    "bos_token_id", "eos_token_id", "pad_token_id",         "initializer_range", "torch_dtype",
    "dtype",        "use_cache",    "transformers_version", "_name_or_path"};

/// Keys that may be absent or null (head_dim: hidden / heads).
constexpr std::array<std::string_view, 4> kOptional = {"head_dim", "parallel_block", "rope_theta",
                                                       "tie_word_embeddings"};
constexpr const char* kRope = "rope_parameters";  // replaces rope_theta since transformers 5

template <size_t N>
bool contains(const std::array<std::string_view, N>& keys, std::string_view key) {
  for (const auto known : keys) {
    if (known == key) return true;
  }
  return false;
}

template <typename T>
T parse_value(const Json& value, std::string_view key, const std::string& file) {
  const auto reject = [&](const char* expected) {
    throw ConfigError(
        fmt::format("{}: {} = {}: expected {}", file, key, printable(value.dump()), expected));
  };
  if constexpr (std::is_same_v<T, bool>) {
    if (!value.is_boolean()) reject("true or false");
  } else if constexpr (std::is_same_v<T, int64_t>) {
    if (!value.is_number_integer()) reject("an integer");
    if (value.is_number_unsigned() &&
        value.get<uint64_t>() > uint64_t(std::numeric_limits<int64_t>::max())) {
      reject("an integer below 2^63");
    }
  } else if constexpr (std::is_same_v<T, std::string>) {
    if (!value.is_string()) reject("a string");
  } else {
    if (!value.is_number()) reject("a number");
  }
  return value.get<T>();
}

/// Parses {"rope_type": "default", "rope_theta": 10000.0}.
double parse_rope_theta(const Json& root, double absent, const std::string& file) {
  const Json& rope = root[kRope];
  double theta = absent;
  bool known = rope.is_object() && !root.contains("rope_theta");
  if (known) {
    for (const auto& [key, value] : rope.items()) {
      if (key == "rope_theta")
        theta = parse_value<double>(value, "rope_parameters.rope_theta", file);
      else
        known = known && key == "rope_type" && value == "default";
    }
  }
  if (known) return theta;
  throw ConfigError(fmt::format(
      "{}: {} = {}: expected rope_theta and rope_type \"default\", and no rope_theta outside", file,
      kRope, printable(rope.dump())));
}

void check_known(const Json& root, const Format& format, const std::string& file) {
  ModelConfig any;
  std::vector<std::string> names{kRope};
  for_each_member(any, [&](const char* key, auto&) { names.emplace_back(key); });
  if (format.has_experts) {
    for_each_moe_member(any, [&](const char* key, auto&) { names.emplace_back(key); });
  }
  if (format.has_window) names.emplace_back(kWindow);
  if (format.has_layer_types) names.emplace_back(kLayerTypes);
  for (const auto& [key, value] : root.items()) {
    bool known = contains(kIgnored, key);
    for (const auto& name : names) known = known || name == key;
    for (const auto& fixed : format.fixed) {
      if (key != fixed.key) continue;
      known = true;
      if (value != Json::parse(fixed.value)) {
        throw ConfigError(fmt::format("{}: {} = {}: expected {}", file, key,
                                      printable(value.dump()), fixed.value));
      }
    }
    if (!known) {
      const std::string close = nearest(key, names);
      throw ConfigError(fmt::format("{}: unknown key {}{}", file, printable(key),
                                    close.empty() ? "" : ": nearest valid key is " + close));
    }
  }
}

const char* layer_type(const ModelConfig& config, int64_t layer) {
  return config.window(layer) > 0 ? kSlidingAttention : kFullAttention;
}

/// Sets full_attention_freq, or no window if no layer has one.
void parse_layer_types(const Json& types, ModelConfig& config, const std::string& file) {
  const auto reject = [&](const std::string& expected) {
    throw ConfigError(fmt::format("{}: {} = {}: expected {}", file, kLayerTypes,
                                  printable(types.dump()), expected));
  };
  if (!types.is_array() || int64_t(types.size()) != config.layers) {
    reject(fmt::format("an array of num_hidden_layers = {} strings", config.layers));
  }
  int64_t first_full = -1, num_full = 0;
  for (int64_t i = 0; i < config.layers; ++i) {
    const Json& type = types[size_t(i)];
    if (type != kFullAttention && type != kSlidingAttention) {
      reject(fmt::format("of \"{}\" and \"{}\"", kFullAttention, kSlidingAttention));
    }
    if (type != kFullAttention) continue;
    if (num_full++ == 0) first_full = i;
  }
  if (num_full == config.layers) config.sliding_window = 0;
  if (config.sliding_window == 0) {
    if (num_full < config.layers) reject(fmt::format("{} with \"{}\"", kWindow, kSlidingAttention));
    return;
  }
  config.full_attention_freq = first_full + 1;
  for (int64_t i = 0; i < config.layers; ++i) {
    if (types[size_t(i)] != layer_type(config, i)) {
      reject(fmt::format("\"{}\" in every n-th layer, or in none", kFullAttention));
    }
  }
}

void parse_window(const Json& root, const Format& format, ModelConfig& config,
                  const std::string& file) {
  config.sliding_window = format.sliding_window;
  if (root.contains(kWindow)) {
    const Json& window = root[kWindow];
    config.sliding_window = window.is_null() ? 0 : parse_value<int64_t>(window, kWindow, file);
    if (!window.is_null() && config.sliding_window < 1) {
      throw ConfigError(fmt::format("{}: {} = {}: expected null or at least 1", file, kWindow,
                                    config.sliding_window));
    }
  }
  if (root.contains(kLayerTypes)) parse_layer_types(root[kLayerTypes], config, file);
}

}  // namespace

std::string to_json(const ModelConfig& config, DType weights) {
  Json root;
  const bool moe = config.experts > 0;
  const Format& format = find_format(config);
  for (const auto& fixed : format.fixed) root[fixed.key] = Json::parse(fixed.value);
  const auto write = [&](const char* key, const auto& value) { root[key] = value; };
  for_each_member(config, write);
  if (moe) for_each_moe_member(config, write);
  if (config.sliding_window > 0) {
    root[kWindow] = config.sliding_window;
  } else if (format.has_window) {
    root[kWindow] = nullptr;
  }
  if (config.full_attention_freq > 0) {
    for (int64_t i = 0; i < config.layers; ++i) root[kLayerTypes].push_back(layer_type(config, i));
  }
  root["bos_token_id"] = config.vocab == kBos + 1 ? Json(kBos) : Json();  // as the tokenizer says
  root["torch_dtype"] = weights == DType::bf16 ? "bfloat16" : "float32";
  return root.dump(2) + "\n";
}

ModelConfig model_config_from_json(const std::string& json, const std::string& file) {
  const Json root = parse_json<Json>(json);
  if (root.is_discarded()) {
    throw ConfigError(
        fmt::format("{}: not JSON, or nested more than {} deep", file, kMaxJsonDepth));
  }
  if (!root.is_object()) throw ConfigError(file + ": expected a JSON object");
  const Format& format = find_format(root, file);
  if (format.name == "mixtral" && !root.contains(kExperts))
    throw ConfigError(fmt::format("{}: key {} is missing", file, kExperts));
  check_known(root, format, file);
  ModelConfig config;
  config.tie_word_embeddings = false;
  config.rope_theta = format.rope_theta;
  config.aux_loss_coeff = format.aux_loss_coeff;
  for_each_member(config, [&]<typename T>(const char* key, T& member) {
    const bool optional = contains(kOptional, key);
    if (root.contains(key) && !(optional && root[key].is_null())) {
      member = parse_value<T>(root[key], key, file);
    } else if (!optional) {
      throw ConfigError(fmt::format("{}: key {} is missing", file, key));
    }
  });
  parse_window(root, format, config, file);
  if (root.contains(kRope)) config.rope_theta = parse_rope_theta(root, config.rope_theta, file);
  if (root.contains(kExperts)) {
    for_each_moe_member(config, [&]<typename T>(const char* key, T& member) {
      if (root.contains(key)) member = parse_value<T>(root[key], key, file);
    });
    if (config.experts < 1) {
      throw ConfigError(
          fmt::format("{}: {} = {}: expected at least 1", file, kExperts, config.experts));
    }
  }
  if (root.value("head_dim", Json()).is_null() && config.heads > 0) {
    if (config.hidden % config.heads != 0) {
      throw ConfigError(fmt::format(
          "{}: no head_dim, and hidden_size = {} is no multiple of num_attention_heads = {}", file,
          config.hidden, config.heads));
    }
    config.head_dim = config.hidden / config.heads;
  }
  try {
    config.check(1);
  } catch (const ConfigError& error) {
    throw ConfigError(fmt::format("{}: {}", file, error.what()));
  }
  return config;
}

}  // namespace tandem
