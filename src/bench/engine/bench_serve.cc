#include "bench/engine/bench_serve.h"

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

#include "bench/engine/requests.h"
#include "tandem/random.h"

namespace tandem {
namespace {

int64_t draw_length(const LengthDistribution& of, uint64_t seed, const char* what, uint64_t i) {
  const double length = of.median * std::exp(of.sigma * double(normal(seed, stream_of(what), i)));
  return std::clamp(int64_t(std::llround(length)), of.min, of.max);
}

/// A short word for each token.
std::string words_of(const std::vector<int32_t>& tokens) {
  static constexpr const char* kWords[] = {"the", "of", "to", "and", "in", "is", "it", "for",
                                           "on",  "as", "at", "by",  "an", "or", "we", "so"};
  std::string text;
  for (const int32_t token : tokens) {
    if (!text.empty()) text += ' ';
    text += kWords[size_t(token) % std::size(kWords)];
  }
  return text;
}

}  // namespace

std::vector<TimedRequest> make_load(const ServeLoad& load) {
  int64_t count = load.requests;
  if (count == 0) {
    const double usual = load.rate > 0 ? 60 * load.rate : 8.0 * load.streams;
    count = std::max<int64_t>(32, std::llround(usual));
  }
  std::vector<TimedRequest> requests;
  std::vector<double> arrivals;
  if (load.rate > 0) arrivals = draw_arrivals(load.seed, count, load.rate);
  for (uint64_t i = 0; i < uint64_t(count); ++i) {
    const auto token = [&](uint64_t of, uint64_t index) {
      return int32_t(philox(load.seed, of, index)[0] % uint64_t(load.vocab));
    };
    std::vector<int32_t> prompt;
    if (uniform(load.seed, stream_of("shared"), i) < load.share) {
      for (uint64_t j = 0; j < uint64_t(load.prefix); ++j) prompt.push_back(token(0, j));
    }
    const int64_t length =
        load.prompt > 0 ? load.prompt : draw_length(kChatPrompts, load.seed, "prompt", i);
    const int64_t end = std::max(length, int64_t(prompt.size()) + 1);
    while (int64_t(prompt.size()) < end) prompt.push_back(token(1 + i, prompt.size()));
    const int64_t max_tokens =
        load.max_tokens > 0 ? load.max_tokens : draw_length(kChatTexts, load.seed, "text", i);
    nlohmann::json body = {{"model", load.model}, {"max_tokens", max_tokens},
                           {"temperature", 0},    {"ignore_eos", true},
                           {"stream", true},      {"stream_options", {{"include_usage", true}}}};
    if (load.is_chat) {
      body["messages"] = {{{"role", "user"}, {"content", words_of(prompt)}}};
    } else {
      body["prompt"] = prompt;
    }
    requests.push_back(
        {.at_s = load.rate > 0 ? arrivals[i] : 0,
         .body = body.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace)});
  }
  return requests;
}

ServeTimes quantiles(const std::vector<double>& values) {
  return {percentile(values, 0.5), percentile(values, 0.9), percentile(values, 0.99)};
}

ServeResult summarize(std::span<const TimedText> texts, double seconds) {
  ServeResult result;
  result.seconds = seconds;
  std::vector<double> first, next, mean, whole;
  for (const TimedText& text : texts) {
    if (text.end_s == 0) continue;  // not sent
    ++result.requests;
    result.is_answered |= text.is_answered;
    if (!text.error.empty()) {
      if (result.error.empty()) result.error = text.error;
      continue;
    }
    ++result.whole;
    result.prompt_tokens += text.prompt_tokens;
    result.tokens += text.tokens;
    result.is_counted &= text.is_counted;
    result.cached_tokens += text.cached_tokens;
    whole.push_back(text.end_s);
    if (!text.arrivals_s.empty()) first.push_back(text.arrivals_s.front());
    if (text.arrivals_s.size() > 1 && text.tokens > 1) {
      mean.push_back((text.arrivals_s.back() - text.arrivals_s.front()) / double(text.tokens - 1));
    }
    for (size_t i = 1; i < text.arrivals_s.size(); ++i) {
      next.push_back(text.arrivals_s[i] - text.arrivals_s[i - 1]);
    }
  }
  result.first_token = quantiles(first);
  result.next_token = quantiles(next);
  result.mean_token = quantiles(mean);
  result.text = quantiles(whole);
  return result;
}

}  // namespace tandem
