// Changes of a row's logits before a token is chosen: penalties of tokens that are there already,
// biases, and a min probability. Done on the host, so that GPUs choose as CPUs do: logits are
// f32 [vocab] there.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "engine/infer/sampling/sampling.h"

namespace tandem {

struct TokenBias {
  int32_t token;
  double bias;
};

struct LogitsProcessors {
  /// Logits of tokens of the prompt and the text are divided by it if positive, else multiplied by
  /// it (CTRL, arXiv 1909.05858).
  double repetition_penalty = 1;
  double presence_penalty = 0;         ///< subtracted from the logit of each token of the text
  double frequency_penalty = 0;        ///< subtracted once for each time that the token is there
  std::vector<TokenBias> biases = {};  ///< added to the logits
  /// Excludes tokens less likely, at the temperature, than this share of the likeliest one's
  /// probability (arXiv 2407.01082), before top-k and top-p.
  double min_p = 0;

  bool change_nothing() const {
    return repetition_penalty == 1 && presence_penalty == 0 && frequency_penalty == 0 &&
           biases.empty() && min_p == 0;
  }
};

/// Throws InvalidArgument naming the rule that is out of range, or a biased token that is outside
/// the vocabulary.
void check(const LogitsProcessors& rules, int64_t vocab);

/// Applies the rules in the order of their members; logits of excluded tokens become -infinity.
/// `tokens`: the prompt, of `prompt` tokens, and the text.
void apply(const LogitsProcessors& rules, std::span<const int32_t> tokens, size_t prompt,
           double temperature, const Tensor& logits);

/// Log-probability of a token that is there.
struct TokenScore {
  float log_prob;
  int64_t rank;  ///< 1: no token is likelier
  std::vector<Sampled> likeliest;
};
/// `likeliest`: the `count` likeliest tokens in its place.
TokenScore score_token(const Tensor& logits, int32_t token, size_t count);
/// The `count` likeliest tokens, by descending logit, then by token, with their log-probabilities.
std::vector<Sampled> likeliest_tokens(const Tensor& logits, size_t count);

}  // namespace tandem
