// A trained model on disk, found and verified in one way for every command that reads one.
#pragma once

#include <functional>
#include <string>

#include "core/safetensors.h"
#include "engine/model/config.h"

namespace tandem {

struct StoredModel {
  std::string directory;  ///< of config.json and model.safetensors
  ModelConfig config;
  SafetensorsFile weights;
  std::string identity;  ///< changes when the configuration or the weights do
};

/// Opens the model in `path`, a folder with a config.json or what a training left: its final/, or
/// its newest checkpoint where that is of a later step. With a state.json every byte is checked
/// against its hashes; without, as in models of others, each tensor against the hash that the file
/// has for it, if any. `note` is told what is chosen, and why. Throws IoError or ConfigError naming
/// the file, and the tensor that is missing, of another shape, or in no model of this config.json.
StoredModel open_model(const std::string& path,
                       const std::function<void(const std::string&)>& note);

}  // namespace tandem
