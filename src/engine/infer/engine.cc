#include "engine/infer/engine.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "tandem/error.h"

namespace tandem {
namespace {

/// Options with their defaults.
EngineOptions resolve(const ModelConfig& config, EngineOptions options) {
  if (options.capacity == 0) options.capacity = config.max_seq;
  if (options.sequences < 1) {
    throw InvalidArgument(fmt::format("sequences {}: expected at least 1", options.sequences));
  }
  if (options.rows < options.sequences) {
    throw InvalidArgument(fmt::format("rows {}: expected at least the {} sequences", options.rows,
                                      options.sequences));
  }
  if (options.pages < 0) {
    throw InvalidArgument(fmt::format("pages {}: expected 0 (for all) or more", options.pages));
  }
  if (options.pages == 0) options.pages = options.sequences * pages_of(options.capacity);
  return options;
}

KvCache::Size cache_size(const EngineOptions& options) {
  return {options.pages, options.sequences, options.rows, options.capacity, options.sequences};
}

}  // namespace

const char* name_of(Finish finish) {
  switch (finish) {
    case Finish::end_token:
      return "end of text";
    case Finish::stop_string:
      return "stop";
    case Finish::max_tokens:
      return "max-tokens";
  }
  return "";
}

Engine::Text::Text(int64_t id_, Request given, const TextTokenizer* tokenizer)
    : id(id_),
      request(std::move(given)),
      continuation(tokenizer, request.ends, request.stops, request.has_text_before),
      tokens(request.prompt) {}

Engine::Engine(Communicator& tp, const ModelConfig& config, const EngineOptions& given)
    : model_(tp, config, given.dtype, cache_size(resolve(config, given)), given.codec),
      tokenizer_(given.tokenizer),
      max_sequences_(given.sequences),
      max_rows_(given.rows),
      pool_(resolve(config, given).pages),
      decoder_(model_.context, max_rows_, max_sequences_, given.overlap) {}

void Engine::initialize(uint64_t seed) {
  initialize_parameters(model_.exec, model_.layout, model_.config, seed, parameters());
  parameters_changed();
}

void check(const Request& request, const ModelConfig& config, int64_t capacity) {
  check(request.sampling);
  check_tokens(config, request.prompt);
  const StopText checked(request.stops);
  if (request.max_tokens < 1) {
    throw InvalidArgument(fmt::format("max_tokens {}: expected at least 1", request.max_tokens));
  }
  if (int64_t(request.prompt.size()) >= capacity) {
    throw InvalidArgument(fmt::format("prompt of {} tokens: expected fewer than the capacity {}",
                                      request.prompt.size(), capacity));
  }
}

int64_t Engine::submit(Request request) {
  const int64_t capacity = model_.cache.max_tokens(), prompt = int64_t(request.prompt.size());
  check(request, model_.config, capacity);
  request.max_tokens = std::min(request.max_tokens, capacity - prompt);
  auto text = std::make_unique<Text>(next_id_, std::move(request), tokenizer_);
  if (text->max_pages() > pool_.size()) {
    throw InvalidArgument(fmt::format("request of {} tokens: expected at most {} ({} pages of {})",
                                      text->max_cached(), pool_.size() * kPageTokens, pool_.size(),
                                      kPageTokens));
  }
  waiting_.push_back(std::move(text));
  return next_id_++;
}

bool Engine::cancel(int64_t request) {
  for (Texts* texts : {&waiting_, &running_}) {
    const auto found = std::ranges::find(*texts, request, [](auto& text) { return text->id; });
    if (found == texts->end()) continue;
    release(**found);
    texts->erase(found);
    return true;
  }
  return false;
}

std::vector<TokenEvent> Engine::step() {
  rows_ = {};
  chosen_.clear();
  num_planned_ = 0;
  plan_tokens();
  plan_chunks();
  admit();
  if (rows_.tokens.empty()) return {};
  const std::span<const Sampled> sampled = decoder_.run(rows_);
  ++stats_.steps;
  stats_.rows += int64_t(rows_.tokens.size());
  std::vector<TokenEvent> events;
  for (size_t i = 0; i < chosen_.size(); ++i) events.push_back(write(*chosen_[i], sampled[i]));
  std::erase_if(running_, [&](const std::unique_ptr<Text>& text) { return text->left() == 0; });
  return events;
}

/// Plans a row for each text that is being written.
void Engine::plan_tokens() {
  for (size_t i = 0; i < running_.size(); ++i) {
    Text& text = *running_[i];
    if (text.left() != 1) continue;
    while (!take_pages(text)) {
      if (!preempt_after(text)) return;  // this one was the newest
    }
    add_rows(text, 1, false);
  }
}

/// Plans rows of prompts that began in an earlier step, whose pages are taken.
void Engine::plan_chunks() {
  for (const auto& text : running_) {
    if (text->left() > 1) add_rows(*text, text->left(), true);
  }
}

void Engine::admit() {
  while (!waiting_.empty() && int64_t(running_.size()) < max_sequences_ &&
         int64_t(rows_.tokens.size()) < max_rows_) {
    Text& text = *waiting_.front();
    // Unless there are pages for all, a running text may soon need one.
    int64_t promised = text.max_pages();
    for (const auto& each : running_) promised += each->max_pages();
    const int64_t needed = pages_of(int64_t(text.tokens.size()));
    if (promised > pool_.size() && needed >= pool_.free() && !running_.empty()) return;
    take_pages(text);
    running_.push_back(std::move(waiting_.front()));
    waiting_.pop_front();
    add_rows(*running_.back(), running_.back()->left(), true);
  }
}

bool Engine::take_pages(Text& text) {
  const int64_t missing = pages_of(int64_t(text.tokens.size())) - int64_t(text.pages.size());
  if (missing > pool_.free()) return false;
  for (int64_t i = 0; i < missing; ++i) text.pages.push_back(pool_.take());
  return true;
}

/// Moves the newest text to those that wait; false if that is `text`.
bool Engine::preempt_after(const Text& text) {
  std::unique_ptr<Text> newest = std::move(running_.back());
  running_.pop_back();
  release(*newest);
  newest->cached = 0;
  ++stats_.preempted;
  waiting_.push_front(std::move(newest));
  return waiting_.front().get() != &text;
}

void Engine::release(Text& text) {
  pool_.give_back(text.pages);
  text.pages.clear();
}

/// Plans the next `count` tokens of a text, or as many as there are rows left.
void Engine::add_rows(Text& text, int64_t count, bool is_chunk) {
  const auto first = int64_t(rows_.tokens.size());
  count = std::min(count, max_rows_ - first);
  if (count == 0) return;
  if (is_chunk) rows_.chunks.push_back({first, count});
  for (int64_t i = text.cached; i < text.cached + count; ++i) {
    rows_.tokens.push_back(text.tokens[size_t(i)]);
    rows_.sequences.push_back(num_planned_);
    rows_.positions.push_back(int32_t(i));
  }
  ++num_planned_;
  rows_.pages.insert(rows_.pages.end(), text.pages.begin(), text.pages.end());
  rows_.pages.resize(size_t(num_planned_ * pages_of(model_.cache.max_tokens())));
  text.cached += count;
  if (text.left() > 0) return;
  rows_.chosen.push_back(int32_t(rows_.tokens.size()) - 1);
  rows_.options.push_back(sample_options(text.request.sampling, text.written()));
  chosen_.push_back(&text);
}

/// Appends a token to a text. A finished one has no token left and no page.
TokenEvent Engine::write(Text& text, const Sampled& sampled) {
  const Request& request = text.request;
  const int32_t token = sampled.token;
  if (token < 0) {
    throw InvalidArgument(
        fmt::format("logits after token {} of request {}: expected finite numbers (the model's "
                    "values leave the range of its dtype)",
                    text.tokens.size() - 1, text.id));
  }
  TokenEvent event{text.id, token, sampled.log_prob, "", std::nullopt};
  Continuation& continuation = text.continuation;
  if (continuation.is_end(token)) {
    event.finish = Finish::end_token;
  } else {
    event.text = continuation.add(token);
    if (continuation.stop()) {
      event.finish = Finish::stop_string;
      event.stop = *continuation.stop();
    } else if (int64_t(text.written()) + 1 == request.max_tokens) {
      event.finish = Finish::max_tokens;
    }
  }
  if (event.finish) {
    event.text += continuation.rest();
    release(text);
  } else {
    text.tokens.push_back(token);
  }
  return event;
}

}  // namespace tandem
