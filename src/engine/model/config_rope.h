// Rotary embedding in config.json: rope_theta with rope_scaling (transformers 4), or
// rope_parameters, which has both (transformers 5).
#pragma once

#include <nlohmann/json.hpp>
#include <string>

#include "engine/model/config.h"

namespace tandem {

/// Sets rope_theta, if given, rope_scaling and, in families that have it (`is_partial`), rotary_dim
/// by partial_rotary_factor. Throws ConfigError for a rope_type or a key of it
/// that is not understood.
void parse_rope(const nlohmann::ordered_json& root, const std::string& file, bool is_partial,
                ModelConfig& config);
constexpr const char *kNoRopeLayers = "no_rope_layers", *kNoRopeInterval = "no_rope_layer_interval";
/// Sets the interval of layers without rotary embedding, or what replaces it: SmolLM3's 0 for each
/// of them.
void parse_no_rope(const nlohmann::ordered_json& root, const std::string& file,
                   ModelConfig& config);
/// Value of rope_scaling; null if there is none.
nlohmann::ordered_json rope_scaling_json(const RopeScaling& scaling);

}  // namespace tandem
