// Trained model on disk, found and verified the same way by every command that reads one.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "engine/model/config.h"
#include "engine/model/side_files.h"
#include "engine/model/weight_files.h"
#include "engine/tokenizer/text_tokenizer.h"

namespace tandem {

struct StoredModel {
  std::string directory;  ///< contains config.json and the files of weights
  ModelConfig config;
  WeightFiles weights;
  std::string identity;  ///< changes if the configuration, the weights or the tokenizer do
  std::shared_ptr<const TextTokenizer> tokenizer;  ///< nullptr: text is read as bytes
  SideFiles side;  ///< of its folder, or for a checkpoint of its run
};

/// Folder of the model in `path`, as open_model chooses it. Throws IoError.
std::string find_model(const std::string& path,
                       const std::function<void(const std::string&)>& note);
/// Folder of its tokenizer and the files next to it: `directory`, or for a checkpoint OUT.
std::string side_folder(const std::string& directory);

/// Opens the model in `path`, a folder with a config.json or a training run: its final/, or its
/// newest checkpoint if that has a later step. With a state.json every byte is checked against its
/// hashes; without, as in third-party models, each tensor against its hash in the file, if any.
/// The tokenizer is that in its folder, or for a checkpoint that of its run; a model trained
/// without one has none. Calls `note` with the choice and its reason. Throws IoError or ConfigError
/// naming the file and the tensor that is missing, of another shape, or in no model of this
/// config.json.
StoredModel open_model(const std::string& path,
                       const std::function<void(const std::string&)>& note);

}  // namespace tandem
