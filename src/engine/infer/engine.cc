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
  const bool is_host = device_traits(make_exec(tp)).is_host;
  if (options.weights && !is_host) {
    check_gpu_generation(config, tp.size(), options.dtype, options.weights);
  }
  if (!options.runs_ahead) options.runs_ahead = !is_host;
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
                .batch_invariant = resolved.options.batch_invariant}),
      runs_ahead_(*resolved.options.runs_ahead) {}

void Engine::initialize(uint64_t seed) {
  WeightWriter writer(model_.exec);
  set_weights([&](const Parameter& p, const WeightViews& to) {
    initialize_parameter(writer, p, model_.config, seed, to);
  });
}

void Engine::set_weights(const SetParameter& set) {
  if (!is_idle()) throw InvalidArgument("set_weights: a request is unfinished: expected none");
  drop_unread_step();
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
    remove_from_launched(**found);
    release(**found);
    list->erase(found);
    return true;
  }
  return false;
}

std::vector<TokenEvent> Engine::step() {
  drop_unread_step();
  if (!launched_) {
    planned_ = {};
    return_pages_before_windows();
    plan();
    if (planned_.rows.tokens.empty()) return {};
    launch();
  }
  const Step step = std::move(*std::exchange(launched_, std::nullopt));
  if (may_run_ahead(step)) {
    plan_ahead(step);
    launch();
    ++stats_.ahead;
  }
  const std::span<const Sampled> sampled = decoder_.collect();
  offer_pages();
  std::vector<TokenEvent> events = choose_all(step, sampled);
  stats_.logit_bytes = decoder_.logit_bytes();
  for (const TokenEvent& event : events) {
    if (!event.finish) continue;
    std::erase_if(running_, [&](const auto& sequence) { return sequence->id == event.request; });
  }
  return events;
}

void Engine::launch() {
  decoder_.launch(planned_.rows);
  ++stats_.steps;
  stats_.rows += int64_t(planned_.rows.tokens.size());
  launched_ = std::exchange(planned_, {});
}

std::vector<TokenEvent> Engine::choose_all(const Step& step, std::span<const Sampled> sampled) {
  std::vector<TokenEvent> events;
  std::vector<Sequence*> sequences;
  for (size_t i = 0; i < step.chosen.size(); ++i) {
    if (step.chosen[i] == nullptr) continue;
    Sequence& sequence = *sequences.emplace_back(step.chosen[i]);
    const bool is_first = sequence.written() == 0;
    const int64_t begin = sequence.begin;
    TokenEvent event = choose(sequence, i, sampled[i]);
    if (is_first) event.dropped = begin;
    event.shared = std::exchange(sequence.found, 0);
    events.push_back(std::move(event));
  }
  score_prompts(step.scored);
  for (size_t i = 0; i < events.size(); ++i) add_scores(*sequences[i], events[i]);
  return events;
}

/// Writes the token that was sampled, or, if the request has rules, another.
TokenEvent Engine::choose(Sequence& sequence, size_t chosen, const Sampled& sampled) {
  const Request& request = sequence.request;
  const bool has_rules = !request.rules.change_nothing();
  if (sampled.token < 0 || !request.needs_logits()) return write(sequence, sampled);
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

void Engine::score_prompts(std::span<const ScoredRows> all) {
  for (const ScoredRows& scored : all) {
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
}

void Engine::add_scores(Sequence& sequence, TokenEvent& event) {
  std::vector<TokenScore>& scores = sequence.scores;
  const auto bad = std::ranges::find_if_not(
      scores, [](const TokenScore& score) { return std::isfinite(score.log_prob); });
  if (bad != scores.end()) fail(sequence, bad - scores.begin(), event);
  event.prompt = std::exchange(scores, {});
}

void Engine::fail(Sequence& sequence, int64_t token, TokenEvent& event) {
  if (!event.finish) sequence.tokens.pop_back();
  if (!event.finish || event.finish == Finish::failed) release(sequence);
  remove_from_launched(sequence);
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
    remove_from_launched(sequence);
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
