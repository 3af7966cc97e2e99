// Sizes of published models, for benchmarks.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "engine/model/config.h"

namespace tandem {

/// "llama-8b", …
std::vector<std::string> published_models();

/// `layers` of the model, 0: all, with its vocabulary; max_seq is left to the caller. `command`
/// begins messages. Throws InvalidArgument for an unknown model or more layers
/// than it has.
ModelConfig published_config(const std::string& command, const std::string& model, int64_t layers);

}  // namespace tandem
