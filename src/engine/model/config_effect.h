// Keys of Hugging Face's config.json that change nothing in what is computed here.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "engine/model/config.h"

namespace tandem {

/// Whether a key has no effect with this value: one of generation, training or other programs, or,
/// unless the family fixes its value, an option that is switched off (null, false, empty).
bool has_no_effect(std::string_view key, const nlohmann::ordered_json& value, bool is_fixed);
/// Whether every program writes this key, so that it need not be named.
bool is_bookkeeping(std::string_view key);

/// Reads a config.json; `unused` receives the names of keys without effect.
ModelConfig model_config_from_json(const std::string& json, const std::string& file,
                                   std::vector<std::string>& unused);

}  // namespace tandem
