#include "engine/infer/engine.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "comm/exec.h"
#include "core/host_copy.h"
#include "engine/config/device_traits.h"
#include "engine/model/initialize.h"
#include "tandem/error.h"

namespace tandem {
namespace {

/// Max window of the layers; 0 if one reads all tokens, or the device's kernels do.
int64_t max_window(Communicator& tp, const ModelConfig& config) {
  int64_t max = 0;
  for (int64_t layer = 0; layer < config.layers; ++layer) {
    if (config.window(layer) == 0) return 0;
    max = std::max(max, config.window(layer));
  }
  return device_forms(make_exec(tp)).reads_windows ? max : 0;
}

/// Tokens that a full context keeps: refills are rare.
int64_t half_of(int64_t capacity) {
  return std::max<int64_t>(1, capacity / 2);
}

/// Max pages of the tokens that `rows` consecutive rows read, each with its window.
int64_t window_pages(int64_t window, int64_t rows) {
  return pages_of(window + rows - 2) + 1;
}

/// Options with their defaults.
EngineOptions resolve(Communicator& tp, const ModelConfig& config, EngineOptions options) {
  if (options.capacity == 0) options.capacity = config.max_seq;
  if (options.sequences < 1) {
    throw InvalidArgument(fmt::format("sequences {}: expected at least 1", options.sequences));
  }
  if (options.rows < options.sequences) {
    throw InvalidArgument(fmt::format("rows {}: expected at least the {} sequences", options.rows,
                                      options.sequences));
  }
  if (options.weights) check_coded_weights(config, tp.size(), *options.weights);
  if (options.weights && !device_traits(make_exec(tp)).is_host) {
    check_gpu_generation(config, tp.size(), options.dtype, options.weights);
  }
  if (options.mixed_rows == 0) options.mixed_rows = options.rows;
  if (options.mixed_rows < 1 || options.mixed_rows > options.rows) {
    throw InvalidArgument(fmt::format("mixed_rows {}: expected 1 to the {} rows, or 0 for all",
                                      options.mixed_rows, options.rows));
  }
  if (options.pages < 0) {
    throw InvalidArgument(fmt::format("pages {}: expected 0 (for all) or more", options.pages));
  }
  if (options.pages > 0) return options;
  const int64_t window = max_window(tp, config);
  int64_t pages = pages_of(options.capacity);
  if (window > 0) pages = std::min(pages, window_pages(window, options.rows));
  options.pages = options.sequences * pages;
  return options;
}

KvCache::Size cache_size(const EngineOptions& options) {
  return {options.pages,    options.sequences, options.rows,
          options.capacity, options.sequences, options.batch_invariant};
}

/// Whether tokens are chosen, or reported, by a row's logits on the host.
bool needs_logits(const Request& request) {
  return !request.rules.change_nothing() || request.alternatives > 0;
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
    case Finish::failed:
      return "failed";
  }
  return "";
}

void set_step_rows(EngineOptions& options, int64_t prompt_rows, bool on_gpus) {
  if (on_gpus) {
    options.rows = std::max(prompt_rows, 2 * options.sequences);
  } else {
    options.rows = options.sequences + prompt_rows;
    options.overlap.strategy = Strategy::serial;
  }
  options.mixed_rows = std::min(options.mixed_rows, options.rows);
}

Engine::Sequence::Sequence(int64_t id_, Request given, const TextTokenizer* tokenizer)
    : id(id_),
      request(std::move(given)),
      continuation(tokenizer, request.text_options()),
      tokens(request.prompt),
      chunked(int64_t(tokens.size())) {}

Engine::Engine(Communicator& tp, const ModelConfig& config, const EngineOptions& options)
    : Engine(tp, config, Resolved{resolve(tp, config, options)}) {}

Engine::Engine(Communicator& tp, const ModelConfig& config, const Resolved& resolved)
    : model_(tp, config, resolved.options.dtype, cache_size(resolved.options),
             resolved.options.codec, resolved.options.weights),
      tokenizer_(resolved.options.tokenizer),
      max_sequences_(resolved.options.sequences),
      max_rows_(resolved.options.rows),
      mixed_rows_(resolved.options.mixed_rows),
      window_(max_window(tp, config)),
      pool_(resolved.options.pages),
      shares_(resolved.options.share_prefixes && window_ == 0 &&
              (config.experts == 0 || resolved.options.codec.experts.is_exact())),
      prefixes_(pool_),
      decoder_(model_.context, max_rows_, max_sequences_,
               {.overlap = resolved.options.overlap,
                .prefill = resolved.options.prefill,
                .batch_invariant = resolved.options.batch_invariant}) {}

void Engine::initialize(uint64_t seed) {
  WeightWriter writer(model_.exec);
  set_weights([&](const Parameter& p, const WeightViews& to) {
    initialize_parameter(writer, p, model_.config, seed, to);
  });
}

void Engine::set_weights(const SetParameter& set) {
  if (!is_idle()) throw InvalidArgument("set_weights: a request is unfinished: expected none");
  while (prefixes_.unused() > 0) prefixes_.drop_oldest();
  model_.set_weights(set);
}

int64_t Engine::submit(Request request) {
  const int64_t capacity = model_.cache.max_tokens(), prompt = int64_t(request.prompt.size());
  check(request, model_.config, capacity);
  if (!request.rolls) request.max_tokens = std::min(request.max_tokens, capacity - prompt);
  auto sequence = std::make_unique<Sequence>(next_id_, std::move(request), tokenizer_);
  if (max_pages(*sequence) > pool_.size()) {
    throw InvalidArgument(fmt::format("request of {} tokens: expected at most {} ({} pages of {})",
                                      sequence->max_cached(capacity), pool_.size() * kPageTokens,
                                      pool_.size(), kPageTokens));
  }
  if (prompt > capacity) {
    const int64_t max_tokens = std::min(capacity, sequence->request.max_tokens);
    sequence->begin = prompt - std::max(half_of(capacity), capacity - max_tokens);
    sequence->chunked = sequence->length();
  }
  waiting_.push_back(std::move(sequence));
  return next_id_++;
}

bool Engine::cancel(int64_t request) {
  for (Sequences* list : {&waiting_, &running_}) {
    const auto found =
        std::ranges::find(*list, request, [](auto& sequence) { return sequence->id; });
    if (found == list->end()) continue;
    release(**found);
    list->erase(found);
    return true;
  }
  return false;
}

std::vector<TokenEvent> Engine::step() {
  rows_ = {};
  chosen_.clear();
  scored_.clear();
  num_planned_ = 0;
  return_pages_before_windows();
  plan();
  if (rows_.tokens.empty()) return {};
  const std::span<const Sampled> sampled = decoder_.run(rows_);
  ++stats_.steps;
  stats_.rows += int64_t(rows_.tokens.size());
  offer_pages();
  std::vector<TokenEvent> events;
  for (size_t i = 0; i < chosen_.size(); ++i) {
    const bool is_first = chosen_[i]->written() == 0;
    const int64_t begin = chosen_[i]->begin;
    events.push_back(choose(*chosen_[i], i, sampled[i]));
    if (is_first) events.back().dropped = begin;
    events.back().shared = std::exchange(chosen_[i]->found, 0);
  }
  score_prompts(events);
  stats_.logit_bytes = decoder_.logit_bytes();
  std::erase_if(running_,
                [&](const std::unique_ptr<Sequence>& sequence) { return sequence->left() == 0; });
  return events;
}

void Engine::plan() {
  const bool takes_turns = decoder_.takes_turns();
  if (!takes_turns || !was_of_tokens_) plan_tokens();
  const auto written = int64_t(rows_.tokens.size());
  step_rows_ = written == 0 ? max_rows_ : std::min(max_rows_, std::max(mixed_rows_, written + 1));
  if (!takes_turns || written == 0) {
    plan_chunks();
    admit();
  }
  if (rows_.tokens.empty()) plan_tokens();
  was_of_tokens_ = rows_.chunks.empty();
}

int64_t Engine::max_pages(const Sequence& sequence) const {
  const int64_t all = pages_of(sequence.max_cached(capacity()));
  return window_ > 0 ? std::min(all, window_pages(window_, max_rows_)) : all;
}

/// Returns pages that no later row reads: the next one reads its token and window_ - 1 before it.
void Engine::return_pages_before_windows() {
  if (window_ == 0) return;
  for (const auto& sequence : running_) {
    const auto end = size_t(std::max<int64_t>(0, sequence->cached + 1 - window_) / kPageTokens);
    if (end <= sequence->returned) continue;
    const auto unread =
        std::span(sequence->pages).subspan(sequence->returned, end - sequence->returned);
    pool_.give_back(unread);
    std::ranges::fill(unread, 0);  // a valid page, but of other tokens
    sequence->returned = end;
  }
}

void Engine::share_prefix(Sequence& sequence) {
  // Rows whose logits score the tokens after them are computed.
  if (!shares_ || sequence.request.prompt_alternatives >= 0) return;
  const std::span context = sequence.context();
  auto count = context.size() - 1;
  if (decoder_.takes_turns()) count = std::min(count, size_t(sequence.chunked));
  sequence.prefix = prefixes_.enter(context.first(count));
  sequence.pages = prefixes_.pages(sequence.prefix);
  sequence.shared = sequence.pages.size();
  sequence.cached = int64_t(sequence.shared) * kPageTokens;
}

void Engine::offer_pages() {
  for (const auto& each : running_) {
    Sequence& sequence = *each;
    if (sequence.prefix == nullptr) continue;
    // Tokens in rows of their own may have other bits than those of a prompt.
    const int64_t end =
        decoder_.takes_turns() ? std::min(sequence.cached, sequence.chunked) : sequence.cached;
    for (; int64_t(sequence.shared + 1) * kPageTokens <= end; ++sequence.shared) {
      const auto tokens =
          sequence.context().subspan(sequence.shared * size_t(kPageTokens), size_t(kPageTokens));
      int32_t& page = sequence.pages[sequence.shared];
      sequence.prefix = prefixes_.extend(sequence.prefix, tokens, page);
      page = prefixes_.page(sequence.prefix);
    }
  }
}

/// Plans a row for each sequence that is being written.
void Engine::plan_tokens() {
  for (size_t i = 0; i < running_.size(); ++i) {
    Sequence& sequence = *running_[i];
    if (!sequence.has_single_row()) continue;
    while (!take_pages(sequence, sequence.cached + 1)) {
      if (!preempt_after(sequence)) return;  // this one was the newest
    }
    add_rows(sequence, 1, false);
  }
}

/// Plans rows of prompts that began in an earlier step, or of contexts that have rolled. Their
/// pages may be missing: then they wait for the sequences that have rows, or else the newest
/// sequence returns its pages.
void Engine::plan_chunks() {
  for (size_t i = 0; i < running_.size(); ++i) {
    Sequence& sequence = *running_[i];
    if (sequence.has_single_row()) continue;
    while (!plan_chunk(sequence)) {
      if (!rows_.tokens.empty() || !preempt_after(sequence)) return;
    }
  }
}

/// Plans as many rows as have pages; false if none has.
bool Engine::plan_chunk(Sequence& sequence) {
  const int64_t room =
      (int64_t(sequence.pages.size()) + free_pages()) * kPageTokens - sequence.cached;
  if (room <= 0) return false;
  const int64_t rows = step_rows_ - int64_t(rows_.tokens.size());
  const int64_t count = std::min({sequence.chunked - sequence.cached, rows, room});
  take_pages(sequence, sequence.cached + count);
  add_rows(sequence, count, true);
  return true;
}

void Engine::admit() {
  while (!waiting_.empty() && int64_t(running_.size()) < max_sequences_ &&
         int64_t(rows_.tokens.size()) < step_rows_) {
    Sequence& sequence = *waiting_.front();
    // Unless there are pages for all, a running sequence may soon need one.
    int64_t promised = max_pages(sequence);
    for (const auto& each : running_) promised += max_pages(*each);
    if (promised > pool_.size() && free_pages() == 0 && !running_.empty()) return;
    // With a window, a prompt may need more pages than there are at once.
    int64_t end = sequence.chunked;
    if (window_ > 0) end = std::min(end, step_rows_ - int64_t(rows_.tokens.size()));
    share_prefix(sequence);
    const int64_t missing = pages_of(end) - int64_t(sequence.pages.size());
    if (promised > pool_.size() && missing >= free_pages() && !running_.empty()) {
      release(sequence);
      sequence.cached = 0;
      return;
    }
    if (!std::exchange(sequence.was_admitted, true)) {  // else it may find its own
      sequence.found = sequence.cached;
      stats_.shared_tokens += sequence.found;
    }
    take_pages(sequence, end);
    running_.push_back(std::move(waiting_.front()));
    waiting_.pop_front();
    add_rows(*running_.back(), end - running_.back()->cached, true);
  }
}

bool Engine::take_pages(Sequence& sequence, int64_t end) {
  const int64_t missing = pages_of(end) - int64_t(sequence.pages.size());
  if (missing > free_pages()) return false;
  while (missing > pool_.free()) prefixes_.drop_oldest();
  for (int64_t i = 0; i < missing; ++i) sequence.pages.push_back(pool_.take());
  return true;
}

/// Moves the newest sequence to those that wait; false if that is `sequence`.
bool Engine::preempt_after(const Sequence& sequence) {
  std::unique_ptr<Sequence> newest = std::move(running_.back());
  running_.pop_back();
  release(*newest);
  newest->cached = 0;
  if (!decoder_.takes_turns()) newest->chunked = newest->length();
  ++stats_.preempted;
  waiting_.push_front(std::move(newest));
  return waiting_.front().get() != &sequence;
}

void Engine::release(Sequence& sequence) {
  pool_.give_back(std::span(sequence.pages).subspan(sequence.returned + sequence.shared));
  prefixes_.leave(std::exchange(sequence.prefix, nullptr));
  sequence.pages.clear();
  sequence.returned = sequence.shared = 0;
}

/// Plans the next `count` tokens of a sequence, or as many as there are rows left.
void Engine::add_rows(Sequence& sequence, int64_t count, bool is_chunk) {
  const auto first = int64_t(rows_.tokens.size());
  count = std::min(count, (is_chunk ? step_rows_ : max_rows_) - first);
  if (count == 0) return;
  if (is_chunk) rows_.chunks.push_back({first, count});
  const Request& request = sequence.request;
  const int64_t scored = std::min(count, int64_t(request.prompt.size()) - 1 - sequence.cached);
  if (request.prompt_alternatives >= 0 && scored > 0 && sequence.written() == 0) {
    scored_.push_back({&sequence, first, sequence.cached, scored});
  }
  for (int64_t i = sequence.cached; i < sequence.cached + count; ++i) {
    rows_.tokens.push_back(sequence.context()[size_t(i)]);
    rows_.sequences.push_back(num_planned_);
    rows_.positions.push_back(int32_t(i));
  }
  ++num_planned_;
  rows_.pages.insert(rows_.pages.end(), sequence.pages.begin(), sequence.pages.end());
  rows_.pages.resize(size_t(num_planned_ * pages_of(model_.cache.max_tokens())));
  sequence.cached += count;
  if (sequence.left() > 0) return;
  rows_.chosen.push_back(int32_t(rows_.tokens.size()) - 1);
  if (needs_logits(request)) rows_.read.push_back(int32_t(rows_.chosen.size()) - 1);
  rows_.options.push_back(sample_options(request.sampling, sequence.written()));
  chosen_.push_back(&sequence);
}

/// Writes the token that was sampled, or, if the request has rules, another.
TokenEvent Engine::choose(Sequence& sequence, size_t chosen, const Sampled& sampled) {
  const Request& request = sequence.request;
  const bool has_rules = !request.rules.change_nothing();
  if (sampled.token < 0 || !needs_logits(request)) return write(sequence, sampled);
  const std::vector<float> logits = decoder_.read_logits(chosen);
  Sampled token = sampled;
  if (has_rules) {
    std::vector<float> changed = logits;
    apply(request.rules, sequence.tokens, request.prompt.size(), request.sampling.temperature,
          host_tensor(changed));
    token = sample_row(logits, sample_options(request.sampling, sequence.written()), changed);
  }
  TokenEvent event = write(sequence, token);
  event.alternatives = likeliest_tokens(host_tensor(logits), size_t(request.alternatives));
  return event;
}

void Engine::score_prompts(std::vector<TokenEvent>& events) {
  for (const ScoredRows& scored : scored_) {
    Sequence& sequence = *scored.sequence;
    sequence.scores.resize(sequence.request.prompt.size() - 1);
    for (int64_t done = 0; done < scored.count;) {
      const int64_t count = std::min(max_sequences_, scored.count - done);
      const std::vector<float> logits = decoder_.compute_logits_after(scored.row + done, count);
      const Tensor rows = Tensor::of(std::span(logits), {count, model_.config.vocab});
      for (int64_t i = 0; i < count; ++i) {
        const auto token = size_t(scored.token + done + i);
        sequence.scores[token] = score_token(rows.rows(i, 1), sequence.tokens[token + 1],
                                             size_t(sequence.request.prompt_alternatives));
      }
      done += count;
    }
  }
  for (size_t i = 0; i < events.size(); ++i) {
    std::vector<TokenScore>& scores = chosen_[i]->scores;
    const auto bad = std::ranges::find_if_not(
        scores, [](const TokenScore& score) { return std::isfinite(score.log_prob); });
    if (bad != scores.end()) fail(*chosen_[i], bad - scores.begin(), events[i]);
    events[i].prompt = std::exchange(scores, {});
  }
}

void Engine::fail(Sequence& sequence, int64_t token, TokenEvent& event) {
  if (!event.finish) sequence.tokens.pop_back();
  if (!event.finish || event.finish == Finish::failed) release(sequence);
  event.finish = Finish::failed;
  event.error = fmt::format(
      "logits after token {} of request {}: expected finite numbers (the model's values leave "
      "the range of its dtype)",
      token, sequence.id);
}

/// Appends a token to a sequence. A finished or failed one has no token left and no page.
TokenEvent Engine::write(Sequence& sequence, const Sampled& sampled) {
  const Request& request = sequence.request;
  const int32_t token = sampled.token;
  TokenEvent event{sequence.id, token, sampled.log_prob, "", std::nullopt};
  if (token < 0) {
    event.finish = Finish::failed;
    fail(sequence, int64_t(sequence.tokens.size()) - 1, event);
    return event;
  }
  Continuation& continuation = sequence.continuation;
  if (continuation.is_end(token)) {
    event.finish = Finish::end_token;
  } else {
    event.text = continuation.add(token);
    if (continuation.stop()) {
      event.finish = Finish::stop_string;
      event.stop = *continuation.stop();
    } else if (int64_t(sequence.written()) + 1 == request.max_tokens) {
      event.finish = Finish::max_tokens;
    }
  }
  if (event.finish) {
    event.text += continuation.rest();
    release(sequence);
  } else {
    sequence.tokens.push_back(token);
    if (sequence.length() > capacity()) roll(sequence);
  }
  return event;
}

void Engine::roll(Sequence& sequence) {
  release(sequence);
  sequence.begin = int64_t(sequence.tokens.size()) - half_of(capacity());
  sequence.cached = 0;
  sequence.chunked = sequence.length();
  ++stats_.rolled;
}

}  // namespace tandem
