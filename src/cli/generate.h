// Parts of `tandem generate` for one prompt and for many.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "cli/commands.h"
#include "cli/devices.h"
#include "cli/result_output.h"
#include "engine/checkpoint/stored_model.h"
#include "engine/infer/engine.h"
#include "engine/infer/sampling/sampling.h"
#include "tandem/codec.h"

namespace tandem::cli {

struct GenerateArguments {
  std::string directory, prompt, prompts, chat, dtype;
  ResultOutput output;
  std::string weights = "none", codec = "none", prefill = "automatic";
  std::vector<std::string> stops;
  int ranks = 1;
  DeviceOptions devices;
  bool allow_uncompressed = false, batch_invariant = false;
  int64_t max_tokens = 256;
  int64_t batch = 16;       ///< texts at once, with `prompts`
  int64_t prompt_rows = 0;  ///< rows of a step for chunks of `prompts`; 0: the devices' default
  SamplingOptions sampling;
  const CLI::Option *temperature = nullptr, *top_k = nullptr, *top_p = nullptr;
  std::vector<int32_t> eos_token_ids;  ///< tokens that end a text; empty: special ones
  LogitsProcessors rules;              ///< of the model's folder
  CodecPolicy policy;                  ///< parsed from `codec`
};

/// Writes to standard output.
void put(const std::string& text);

struct PromptLine {
  Request request;
  bool wants_log_probs = false;
  std::vector<std::string> tools = {};  ///< names of functions whose calls are looked for
};

struct PromptFile {
  std::string hash;  ///< of its content
  std::vector<PromptLine> lines;
};

/// Requests of the file --prompts, one JSON object a line. Throws ConfigError naming the line, and
/// the key with its value.
PromptFile read_prompts(const GenerateArguments& arguments, const StoredModel& stored);

/// Generates the texts, up to `batch` at once. Rank 0 writes them to standard output, a JSON object
/// a line, in the order of the prompts, each as soon as those before it are written. Collective.
void generate_all(Communicator& tp, const GenerateArguments& arguments, const StoredModel& stored,
                  const std::vector<PromptLine>& lines);

}  // namespace tandem::cli
