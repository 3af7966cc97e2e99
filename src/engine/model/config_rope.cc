#include "engine/model/config_rope.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <string_view>
#include <utility>
#include <vector>

#include "engine/model/config_value.h"

namespace tandem {
namespace {

using Json = nlohmann::ordered_json;

constexpr const char* kScaling = "rope_scaling";
constexpr const char* kParameters = "rope_parameters";
constexpr const char* kTypes[] = {"default", "linear", "dynamic", "llama3", "yarn"};

/// Object of rope_scaling or rope_parameters.
class RopeObject {
 public:
  RopeObject(const Json& object, std::string key, const std::string& file)
      : object_(object), key_(std::move(key)), file_(file) {
    if (!object.is_object()) reject_value(file_, key_, object, "null or an object");
  }

  /// Marks the key as read; nullptr if it is absent or null.
  const Json* find(const char* key) {
    read_.emplace_back(key);
    const auto found = object_.find(key);
    return found == object_.end() || found->is_null() ? nullptr : &*found;
  }
  double number(const char* key, double absent) {
    const Json* const value = find(key);
    return value ? parse_value<double>(*value, key_ + "." + key, file_) : absent;
  }
  double required(const char* key) {
    if (!find(key)) {
      throw ConfigError(fmt::format("{}: key {}.{} is missing", file_, key_, key));
    }
    return number(key, 0);
  }
  /// `type` is the name of rope_type in files from before 2024.
  std::string type() {
    const Json *const type_key = find("rope_type"), *const old = find("type");
    if (!type_key && !old) {
      if (key_ == kParameters) return kTypes[0];
      throw ConfigError(fmt::format("{}: key {}.rope_type is missing", file_, key_));
    }
    if (type_key && old && *type_key != *old) {
      reject_value(file_, key_ + ".type", *old, type_key->dump());
    }
    const Json& name = type_key ? *type_key : *old;
    for (const char* known : kTypes) {
      if (name == known) return known;
    }
    reject_value(file_, key_ + (type_key ? ".rope_type" : ".type"), name,
                 "default, linear, dynamic, llama3 or yarn");
  }
  void require_all_read() const {
    for (const auto& [key, value] : object_.items()) {
      if (std::ranges::find(read_, key) != read_.end()) continue;
      throw ConfigError(fmt::format("{}: unknown key {}.{}: expected only {}", file_, key_,
                                    printable(key), fmt::join(read_, ", ")));
    }
  }
  const std::string& key() const { return key_; }

 private:
  const Json& object_;
  std::string key_;
  const std::string& file_;
  std::vector<std::string> read_;
};

double attention_scale(double factor, double coefficient) {
  return factor <= 1 ? 1 : 0.1 * coefficient * std::log(factor) + 1;
}

/// arXiv 2309.00071, 3.4; the ratio of two such factors is DeepSeek's.
void parse_yarn(RopeObject& rope, const std::string& file, const ModelConfig& config,
                RopeScaling& s) {
  s.original_max_seq = rope.number("original_max_position_embeddings", double(config.max_seq));
  s.beta_fast = rope.number("beta_fast", s.beta_fast);
  s.beta_slow = rope.number("beta_slow", s.beta_slow);
  const double scale = rope.number("mscale", 0), scale_all = rope.number("mscale_all_dim", 0);
  s.attention_factor = scale != 0 && scale_all != 0
                           ? attention_scale(s.factor, scale) / attention_scale(s.factor, scale_all)
                           : attention_scale(s.factor, 1);
  s.attention_factor = rope.number("attention_factor", s.attention_factor);
  if (const Json* const truncate = rope.find("truncate")) {
    s.truncate = parse_value<bool>(*truncate, rope.key() + ".truncate", file);
  }
}

constexpr const char* kRotaryShare = "partial_rotary_factor";

/// `share`: partial_rotary_factor at `key`.
void set_rotary_dim(double share, const std::string& key, const std::string& file,
                    ModelConfig& config) {
  const auto rotary = int64_t(share * double(config.head_dim));
  if (!(share > 0 && share <= 1) || rotary < 2 || rotary % 2 != 0) {
    reject_value(file, key, share,
                 fmt::format("a share of head_dim = {} that is an even number", config.head_dim));
  }
  config.rotary_dim = rotary == config.head_dim ? 0 : rotary;
}

void parse_object(RopeObject& rope, const std::string& file, bool is_partial, ModelConfig& config) {
  RopeScaling s;
  s.type = rope.type();
  if (!s.is_none()) s.factor = rope.required("factor");
  if (s.type == "llama3") {
    s.low_freq_factor = rope.required("low_freq_factor");
    s.high_freq_factor = rope.required("high_freq_factor");
    s.original_max_seq = rope.required("original_max_position_embeddings");
  }
  if (s.type == "dynamic") rope.find("original_max_position_embeddings");  // has no effect
  if (s.type == "yarn") parse_yarn(rope, file, config, s);
  if (const double share = rope.number(kRotaryShare, 1); rope.find(kRotaryShare)) {
    const std::string key = rope.key() + "." + kRotaryShare;
    if (is_partial) set_rotary_dim(share, key, file, config);
    if (!is_partial && share != 1) reject_value(file, key, share, "1");
  }
  config.rope_scaling = s;
  rope.require_all_read();
}

}  // namespace

void parse_rope(const Json& root, const std::string& file, bool is_partial, ModelConfig& config) {
  const auto value = [&](const char* key) {
    return root.contains(key) && !root[key].is_null() ? &root[key] : nullptr;
  };
  const Json* const share = is_partial ? value(kRotaryShare) : nullptr;
  if (share) {
    set_rotary_dim(parse_value<double>(*share, kRotaryShare, file), kRotaryShare, file, config);
  }
  if (const Json* const scaling = value(kScaling)) {
    RopeObject rope(*scaling, kScaling, file);
    parse_object(rope, file, is_partial, config);
  }
  const Json* const parameters = value(kParameters);
  if (!parameters) return;
  for (const char* key : {kScaling, "rope_theta"}) {
    if (const Json* const twice = value(key)) {
      reject_value(file, key, *twice, fmt::format("none with {}", kParameters));
    }
  }
  RopeObject rope(*parameters, kParameters, file);
  config.rope_theta = rope.number("rope_theta", config.rope_theta);
  parse_object(rope, file, is_partial, config);
}

void parse_no_rope(const Json& root, const std::string& file, ModelConfig& config) {
  constexpr int64_t kDefault = 4;
  int64_t& interval = config.no_rope_layer_interval;
  interval = has_value(root, kNoRopeInterval)
                 ? parse_value<int64_t>(root[kNoRopeInterval], kNoRopeInterval, file)
                 : kDefault;
  if (interval < 2) reject_value(file, kNoRopeInterval, interval, "at least 2");
  if (!has_value(root, kNoRopeLayers)) return;
  const Json& layers = root[kNoRopeLayers];
  const auto reject = [&](const std::string& expected) {
    reject_value(file, kNoRopeLayers, layers, expected);
  };
  const auto is_switch = [](const Json& each) {
    return each.is_number_integer() && (each == 0 || each == 1);
  };
  if (!layers.is_array() || int64_t(layers.size()) < config.layers ||
      !std::ranges::all_of(layers, is_switch)) {
    reject(fmt::format("an array of num_hidden_layers = {} numbers, 0 or 1", config.layers));
  }
  const auto is_listed = [&] {
    for (int64_t i = 0; i < config.layers; ++i) {
      if ((layers[size_t(i)] != 0) != config.has_rope(i)) return false;
    }
    return true;
  };
  if (is_listed()) return;
  int64_t first = 0;
  while (first < config.layers && layers[size_t(first)] != 0) ++first;
  interval = first == config.layers ? 0 : first + 1;
  if (interval == 1 || !is_listed()) reject("0 in every n-th layer, n > 1");
}

nlohmann::ordered_json rope_scaling_json(const RopeScaling& s) {
  if (s.is_none()) return nullptr;
  Json rope;
  rope["rope_type"] = s.type;
  rope["factor"] = s.factor;
  if (s.type == "llama3") {
    rope["low_freq_factor"] = s.low_freq_factor;
    rope["high_freq_factor"] = s.high_freq_factor;
  }
  if (s.original_max_seq > 0) {
    const auto whole = int64_t(s.original_max_seq);
    rope["original_max_position_embeddings"] =
        double(whole) == s.original_max_seq ? Json(whole) : Json(s.original_max_seq);
  }
  if (s.type == "yarn") {
    rope["beta_fast"] = s.beta_fast;
    rope["beta_slow"] = s.beta_slow;
    rope["attention_factor"] = s.attention_factor;
    rope["truncate"] = s.truncate;
  }
  return rope;
}

}  // namespace tandem
