// A load on a server of texts, for `tandem bench serve`: prompts of random tokens, sent by a number
// of clients or at random times.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "engine/serve/http/completion_load.h"

namespace tandem {

/// Lengths of texts: log-normal, so that half of them are shorter than `median`.
struct LengthDistribution {
  double median, sigma;  ///< of the logarithm
  int64_t min, max;
};
/// Close to those of ShareGPT's conversations: 204 tokens of a prompt and 182 of its text on
/// average.
constexpr LengthDistribution kChatPrompts{99, 1.2, 4, 2048}, kChatTexts{121, 0.9, 4, 1024};

struct ServeLoad {
  std::string model;     ///< name in the requests
  bool is_chat = false;  ///< a message of as many short words, instead of tokens
  int64_t requests = 0;  ///< 0: 8 for each stream, or those of a minute, and at least 32
  int streams = 16;      ///< max texts that are awaited at once
  double rate = 0;       ///< requests a second at random times (a Poisson process); 0: as texts end
  int64_t prompt = 0;    ///< tokens of each prompt; 0: kChatPrompts
  int64_t max_tokens = 0;  ///< tokens of each text; 0: kChatTexts
  int64_t vocab = 256;     ///< prompts are of tokens below it
  int64_t prefix = 0;      ///< first tokens that a share of the prompts has in common
  double share = 0.9;      ///< share of these prompts
  uint64_t seed = 0;
};

std::vector<TimedRequest> make_load(const ServeLoad& load);

struct ServeTimes {
  double p50 = 0, p90 = 0, p99 = 0;  ///< s
};
/// Nearest rank; 0 without values.
ServeTimes quantiles(const std::vector<double>& values);

struct ServeResult {
  int64_t requests = 0, whole = 0;  ///< sent ones, and those of them whose texts are whole
  int64_t prompt_tokens = 0, tokens = 0, cached_tokens = 0;
  double seconds = 0;        ///< from the first request to the end of the last text
  ServeTimes first_token;    ///< from a request to the first part of its text
  ServeTimes next_token;     ///< from the part before
  ServeTimes mean_token;     ///< of a text: from its first part to its last, by its other tokens
  ServeTimes text;           ///< from a request to the end of its text
  bool is_counted = true;    ///< all texts' tokens by the server; else parts are counted
  bool is_answered = false;  ///< a request was
  std::string error;         ///< the first, empty if all texts are whole

  double tokens_per_s() const { return seconds > 0 ? double(tokens) / seconds : 0; }
};

ServeResult summarize(std::span<const TimedText> texts, double seconds);

}  // namespace tandem
