#include "engine/model/config_functions.h"

#include <cmath>

#include "engine/model/config_value.h"

namespace tandem {
namespace {

using Json = nlohmann::ordered_json;
constexpr const char *kFunction = "hidden_activation", *kScalar = "query_pre_attn_scalar",
                     *kScoreCap = "attn_logit_softcapping", *kLogitCap = "final_logit_softcapping",
                     *kPattern = "sliding_window_pattern", *kLocalBase = "rope_local_base_freq",
                     *kLayerRope = "rope_parameters";

const Json* find(const Json& root, const char* key) {
  const auto found = root.find(key);
  return found == root.end() || found->is_null() ? nullptr : &*found;
}

double parse_cap(const Json& root, const char* key, double absent, const std::string& file) {
  if (!root.contains(key)) return absent;
  const Json* const value = find(root, key);
  return value ? parse_value<double>(*value, key, file) : 0;
}

/// rope_theta of layers with a window, whose frequencies are not scaled.
double parse_local_rope(const Json& rope, double absent, const std::string& file) {
  const std::string name = std::string(kLayerRope) + ".sliding_attention";
  if (!rope.is_object()) reject_value(file, name, rope, "an object");
  for (const auto& [key, value] : rope.items()) {
    if (key == "rope_theta" || (key == "rope_type" && value == "default")) continue;
    reject_value(file, name + "." + key, value, "rope_theta and rope_type = \"default\" only");
  }
  const Json* const theta = find(rope, "rope_theta");
  return theta ? parse_value<double>(*theta, name + ".rope_theta", file) : absent;
}

}  // namespace

void parse_activation(const Json& root, const char* key, const std::string& file,
                      ModelConfig& config) {
  const Json* const name = find(root, key);
  if (!name) return;
  if (*name == "gelu_pytorch_tanh") {
    config.mlp_activation = "gelu_pytorch_tanh";
  } else if (*name == "silu" || *name == "swish") {
    config.mlp_activation = "silu";
  } else {
    reject_value(file, key, *name, "\"silu\" or \"gelu_pytorch_tanh\"");
  }
}

double gemma_embedding_multiplier(int64_t hidden) {
  return std::sqrt(double(hidden));
}

int64_t query_pre_attn_scalar(const ModelConfig& c) {
  if (c.attention_multiplier == 0) return c.head_dim;
  const double inverse = 1 / c.attention_multiplier;
  const double scalar = std::round(inverse * inverse);
  if (!(scalar >= 1 && scalar <= 1e9)) return 0;
  return 1 / std::sqrt(scalar) == c.attention_multiplier ? int64_t(scalar) : 0;
}

void parse_gemma(const Json& root, const GemmaFamily& family, const std::string& file,
                 ModelConfig& config) {
  constexpr const char* kBidirectional = "use_bidirectional_attention";
  const Json* const bidirectional = find(root, kBidirectional);
  if (bidirectional && *bidirectional != false) {
    reject_value(file, kBidirectional, *bidirectional, "false");
  }
  constexpr int64_t kDefaultScalar = 256;
  const Json* const value = find(root, kScalar);
  const int64_t scalar = value ? parse_value<int64_t>(*value, kScalar, file) : kDefaultScalar;
  if (scalar < 1) reject_value(file, kScalar, scalar, "at least 1");
  config.attention_multiplier = scalar == config.head_dim ? 0 : 1 / std::sqrt(double(scalar));
  config.embedding_multiplier = gemma_embedding_multiplier(config.hidden);
  config.zero_centered_norms = true;
  config.mlp_activation = "gelu_pytorch_tanh";
  parse_activation(root, kFunction, file, config);
  config.attention_softcap = family.attention_softcap;
  if (family.rope_local_theta == 0) {
    config.attention_softcap = parse_cap(root, kScoreCap, family.attention_softcap, file);
  }
  config.logits_softcap = parse_cap(root, kLogitCap, family.logits_softcap, file);
}

void parse_gemma_layers(Json& root, const GemmaFamily& family, const std::string& file,
                        ModelConfig& config) {
  if (!find(root, "layer_types") && config.sliding_window > 0) {
    const Json* const value = find(root, kPattern);
    const int64_t pattern =
        value ? parse_value<int64_t>(*value, kPattern, file) : family.window_pattern;
    if (pattern < 1) reject_value(file, kPattern, pattern, "at least 1");
    if (pattern == 1) config.sliding_window = 0;
    config.full_attention_freq = pattern == 1 || pattern > config.layers ? 0 : pattern;
  }
  if (family.rope_local_theta == 0) return;
  double theta = family.rope_local_theta;
  if (const Json* const value = find(root, kLocalBase)) {
    theta = parse_value<double>(*value, kLocalBase, file);
  }
  const Json* const rope = find(root, kLayerRope);
  if (rope && rope->is_object() &&
      (rope->contains("full_attention") || rope->contains("sliding_attention"))) {
    if (const Json* const local = find(*rope, "sliding_attention")) {
      theta = parse_local_rope(*local, theta, file);
    }
    const Json* const full = find(*rope, "full_attention");
    const Json of_full = full ? *full : Json::object();
    root[kLayerRope] = of_full;
  }
  if (theta < 1) reject_value(file, kLocalBase, theta, "at least 1");
  config.rope_local_theta = config.sliding_window > 0 ? theta : 0;
}

void write_gemma(const ModelConfig& c, Json& root) {
  root[kFunction] = c.mlp_activation;
  root[kScalar] = query_pre_attn_scalar(c);
  const auto write_cap = [&](const char* key, double cap) {
    root[key] = cap > 0 ? Json(cap) : Json();
  };
  write_cap(kScoreCap, c.attention_softcap), write_cap(kLogitCap, c.logits_softcap);
  if (c.rope_local_theta > 0) root[kLocalBase] = c.rope_local_theta;
  for (int64_t i = 0; i < c.layers; ++i) {
    root["layer_types"].push_back(c.window(i) > 0 ? "sliding_attention" : "full_attention");
  }
}

}  // namespace tandem
