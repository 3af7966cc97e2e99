// Request for a text, and its fields, which are listed once: ranks exchange them, and clients and
// files of prompts set some of them in JSON.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "engine/infer/continuation.h"
#include "engine/infer/sampling/logits_processors.h"
#include "engine/infer/sampling/sampling.h"
#include "engine/model/config.h"

namespace tandem {

constexpr int64_t kMaxAlternatives = 20;

struct Request {
  std::vector<int32_t> prompt;  ///< at least one token
  int64_t max_tokens = 16;
  SamplingOptions sampling = {};            ///< token i of the continuation depends on (seed, i)
  std::vector<int32_t> eos_token_ids = {};  ///< as in TextOptions, like the next ones
  std::vector<int32_t> stop_token_ids = {};
  std::vector<std::string> stops = {};
  LogitsProcessors rules = {};
  /// Likeliest tokens to report with each token, at most kMaxAlternatives; the same of each token
  /// of the prompt but the first, if it is not below 0.
  int64_t alternatives = 0, prompt_alternatives = -1;
  bool has_text_before = true, hides_special = true;
  std::vector<int32_t> shown = {};
  /// A context that is full loses its first half, and a prompt that is too long its beginning;
  /// otherwise the text ends, and such a prompt is refused.
  bool rolls = false;

  /// Whether tokens are chosen, or reported, by a row's logits on the host.
  bool needs_logits() const { return !rules.change_nothing() || alternatives > 0; }
  TextOptions text_options() const {
    return {eos_token_ids, stop_token_ids, stops, has_text_before, hides_special, shown};
  }
};

enum class SetBy : uint8_t { program, client };

/// Calls field(name, value, SetBy) for each field of a request, const or not, in one order. Names
/// are those of OpenAI's clients and of vLLM.
template <typename R, typename Field>
void visit(R& request, const Field& field) {
  field("prompt", request.prompt, SetBy::program);
  field("max_tokens", request.max_tokens, SetBy::client);
  field("temperature", request.sampling.temperature, SetBy::client);
  field("top_k", request.sampling.top_k, SetBy::client);
  field("top_p", request.sampling.top_p, SetBy::client);
  field("seed", request.sampling.seed, SetBy::client);
  field("eos_token_ids", request.eos_token_ids, SetBy::program);
  field("stop_token_ids", request.stop_token_ids, SetBy::client);
  field("stop", request.stops, SetBy::client);
  field("repetition_penalty", request.rules.repetition_penalty, SetBy::client);
  field("presence_penalty", request.rules.presence_penalty, SetBy::client);
  field("frequency_penalty", request.rules.frequency_penalty, SetBy::client);
  field("min_p", request.rules.min_p, SetBy::client);
  field("logit_bias", request.rules.biases, SetBy::client);
  field("top_logprobs", request.alternatives, SetBy::program);
  field("prompt_logprobs", request.prompt_alternatives, SetBy::program);
  field("skip_special_tokens", request.hides_special, SetBy::client);
  field("has_text_before", request.has_text_before, SetBy::program);
  field("shown", request.shown, SetBy::program);
  field("rolls", request.rolls, SetBy::program);
}

/// Throws InvalidArgument naming what is wrong with a request to a model with room for `capacity`
/// tokens.
void check(const Request& request, const ModelConfig& config, int64_t capacity);

}  // namespace tandem
