// state.json of a checkpoint, which has a hash of its other contents.
#pragma once

#include <nlohmann/json.hpp>
#include <string>

#include "engine/checkpoint/checkpoint.h"

namespace tandem {

/// Canonical text, with a hash of its other contents.
std::string seal(nlohmann::json root);
nlohmann::json to_json(const TrainState& state);
/// Throws IoError with `file` unless the text is a sealed one of this format.
nlohmann::json parse_state(const std::string& text, const std::string& file);
/// Throws IoError with `file` if a key is missing.
TrainState state_from_json(const nlohmann::json& root, const std::string& file);

}  // namespace tandem
