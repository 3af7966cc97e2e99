#include "engine/serve/serve_metrics.h"

#include <fmt/format.h>

#include <iterator>
#include <string_view>
#include <utility>

namespace tandem {

void ServeMetrics::begin(int64_t prompt_tokens) {
  ++begun_;
  prompt_tokens_ += prompt_tokens;
}

void ServeMetrics::add_first_token(double waited_s) {
  for (size_t i = 0; i < std::size(kBuckets); ++i) first_token_[i] += waited_s <= kBuckets[i];
  ++num_first_;
  first_token_s_ += waited_s;
}

std::string ServeMetrics::text(const ServeLoop::Stats& loop) const {
  std::string text;
  const auto head = [&](std::string_view name, std::string_view type, std::string_view help) {
    text +=
        fmt::format("# HELP tandem_serve_{0} {2}\n# TYPE tandem_serve_{0} {1}\n", name, type, help);
  };
  const auto add = [&](std::string_view name, std::string_view type, std::string_view help,
                       int64_t value) {
    head(name, type, help);
    text += fmt::format("tandem_serve_{} {}\n", name, value);
  };
  head("requests_total", "counter", "Requests for texts by how they ended.");
  int64_t active = begun_;
  const auto add_end = [&](std::string_view end, int64_t count) {
    text += fmt::format("tandem_serve_requests_total{{end=\"{}\"}} {}\n", end, count);
  };
  for (const auto& [how, end] : {std::pair(End::done, "done"), std::pair(End::failed, "failed"),
                                 std::pair(End::left, "client left")}) {
    add_end(end, ended_[size_t(how)]);
    active -= ended_[size_t(how)];
  }
  add_end("refused", refused_);
  add("requests_active", "gauge", "Requests for texts that are not finished.", active);
  add("texts_active", "gauge", "Texts that are written or wait.", loop.unfinished);
  add("prompt_tokens_total", "counter", "Tokens of prompts.", prompt_tokens_);
  add("prompt_tokens_shared_total", "counter",
      "Tokens of prompts, once for each text, that were in the cache.", loop.shared_tokens);
  add("tokens_total", "counter", "Tokens written.", tokens_);
  add("steps_total", "counter", "Steps of the engine.", loop.steps);
  add("rows_total", "counter", "Rows of these steps.", loop.rows);
  add("preempted_total", "counter", "Texts that gave their pages back.", loop.preempted);
  add("pages", "gauge", "Pages of the cache, of 64 tokens.", loop.pages);
  add("pages_used", "gauge", "Pages in use.", loop.pages_used);
  if (!loop.receipts.empty()) {
    head("operator_calls_total", "counter",
         "Calls of rank 0's operators, by the strategy they were asked for and what ran.");
  }
  for (const Receipt& each : loop.receipts) {
    text += fmt::format(
        "tandem_serve_operator_calls_total{{op=\"{}\",shape=\"{}\",asked=\"{}\",ran=\"{}\","
        "candidate=\"{}\"}} {}\n",
        each.op, each.shape, name_of(each.asked), name_of(each.ran), each.candidate, each.calls);
  }
  head("first_token_seconds", "histogram", "Time from a request to its first token.");
  for (size_t i = 0; i < std::size(kBuckets); ++i) {
    text += fmt::format("tandem_serve_first_token_seconds_bucket{{le=\"{}\"}} {}\n", kBuckets[i],
                        first_token_[i]);
  }
  text += fmt::format("tandem_serve_first_token_seconds_bucket{{le=\"+Inf\"}} {}\n", num_first_);
  text += fmt::format("tandem_serve_first_token_seconds_sum {}\n", first_token_s_);
  text += fmt::format("tandem_serve_first_token_seconds_count {}\n", num_first_);
  return text;
}

}  // namespace tandem
