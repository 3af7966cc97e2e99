// Sizes of published models, for plans and benchmarks.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "engine/model/config.h"

namespace tandem {

/// "llama-3.2-1b", …: smallest of each family first.
std::vector<std::string> published_models();

/// Names of those that benchmarks time, "llama-1b", ….
std::vector<std::string> benchmark_models();

/// The model of that name, or of its name in benchmarks; max_seq is the window that it was
/// trained for. Nothing if the name is not known; Unsupported for one whose layers Tandem does not
/// have.
std::optional<ModelConfig> find_published_model(std::string_view name);

/// Its sizes without norms of q and k and biases, for benchmarks: `layers` of it, 0: all; max_seq
/// is left to the caller. `command` begins messages. Throws InvalidArgument for an unknown model or
/// more layers than it has.
ModelConfig published_config(const std::string& command, const std::string& model, int64_t layers);

}  // namespace tandem
