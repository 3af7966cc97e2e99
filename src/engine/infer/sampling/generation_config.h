// Defaults of generating that a model's folder names: generation_config.json and config.json.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "engine/checkpoint/stored_model.h"
#include "engine/infer/sampling/logits_processors.h"

namespace tandem {

struct GenerationDefaults {
  std::vector<int32_t> eos_token_ids;  ///< tokens that end a text; empty: the folder names none
  /// nullopt without a generation_config.json. Without do_sample the temperature is 0.
  std::optional<double> temperature, top_p;
  std::optional<int64_t> top_k;
  LogitsProcessors rules = {};
};

/// Reads eos_token_id, do_sample, temperature, top_k, top_p and repetition_penalty. The end token
/// that the tokenizer's files name ends a text, too. Calls `note` with the names of other keys that
/// would change the text. Throws ConfigError naming the file, the key and what is expected.
GenerationDefaults read_generation_defaults(const StoredModel& stored,
                                            const std::function<void(const std::string&)>& note);

}  // namespace tandem
