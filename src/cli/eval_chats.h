// Loss of a model on the answers of chats.
#pragma once

#include <string>

#include "cli/evaluation.h"
#include "tandem/communicator.h"

namespace tandem::cli {

/// Scores the answers of the files' chats, each chat on its own, and writes the scores of all to
/// standard output or as JSON to `json`. Throws ConfigError for a model without a tokenizer or
/// template, IoError for a line that holds no chat. Collective.
void evaluate_chats(Communicator& comm, const EvaluateOptions& options,
                    const EvaluationInputs& inputs, const std::string& json);

}  // namespace tandem::cli
