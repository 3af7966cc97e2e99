// A trained model on disk: DIR/config.json and DIR/model.safetensors, in Hugging Face's layout.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "core/safetensors.h"
#include "model/config.h"
#include "model/transformer.h"

namespace tandem {

/// `directory` itself, or its `final` where only that holds a config.json. Throws IoError when
/// neither does.
std::string model_directory(const std::string& directory);

/// Throws IoError or ConfigError naming the file.
ModelConfig load_model_config(const std::string& directory);

/// Changes when the model does: hashes of its configuration and of its weights. Throws IoError.
std::string model_identity(const ModelConfig& config, const SafetensorsFile& weights);

/// Reads this rank's shard of every parameter (f32, bf16 or f16 on disk). Throws IoError naming the
/// tensor that is missing or has another shape.
void load_parameters(const SafetensorsFile& file, const std::vector<Parameter>& parameters,
                     std::span<float> values);

}  // namespace tandem
