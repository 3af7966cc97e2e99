// Plans of Engine's steps: rows, pages, and which requests run.
#include <algorithm>
#include <utility>

#include "engine/infer/engine.h"

namespace tandem {

void Engine::plan() {
  const bool takes_turns = decoder_.takes_turns();
  if (!takes_turns || !was_of_tokens_) plan_tokens();
  const auto written = int64_t(planned_.rows.tokens.size());
  step_rows_ = written == 0 ? max_rows_ : std::min(max_rows_, std::max(mixed_rows_, written + 1));
  if (!takes_turns || written == 0) {
    plan_chunks();
    admit();
  }
  if (planned_.rows.tokens.empty()) plan_tokens();
  was_of_tokens_ = planned_.rows.chunks.empty();
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
    int64_t end = std::min(sequence.cached, sequence.length());
    if (decoder_.takes_turns()) end = std::min(end, sequence.chunked);
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
      if (!planned_.rows.tokens.empty() || !preempt_after(sequence)) return;
    }
  }
}

/// Plans as many rows as have pages; false if none has.
bool Engine::plan_chunk(Sequence& sequence) {
  const int64_t room =
      (int64_t(sequence.pages.size()) + free_pages()) * kPageTokens - sequence.cached;
  if (room <= 0) return false;
  const int64_t rows = step_rows_ - int64_t(planned_.rows.tokens.size());
  const int64_t count = std::min({sequence.chunked - sequence.cached, rows, room});
  take_pages(sequence, sequence.cached + count);
  add_rows(sequence, count, true);
  return true;
}

void Engine::admit() {
  while (!waiting_.empty() && int64_t(running_.size()) < max_sequences_ &&
         int64_t(planned_.rows.tokens.size()) < step_rows_) {
    Sequence& sequence = *waiting_.front();
    // Unless there are pages for all, a running sequence may soon need one.
    int64_t promised = max_pages(sequence);
    for (const auto& each : running_) promised += max_pages(*each);
    if (promised > pool_.size() && free_pages() == 0 && !running_.empty()) return;
    // With a window, a prompt may need more pages than there are at once.
    int64_t end = sequence.chunked;
    if (window_ > 0) end = std::min(end, step_rows_ - int64_t(planned_.rows.tokens.size()));
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
  StepRows& rows = planned_.rows;
  const auto first = int64_t(rows.tokens.size());
  count = std::min(count, (is_chunk ? step_rows_ : max_rows_) - first);
  if (count == 0) return;
  if (is_chunk) rows.chunks.push_back({first, count});
  const Request& request = sequence.request;
  const int64_t scored = std::min(count, int64_t(request.prompt.size()) - 1 - sequence.cached);
  if (request.prompt_alternatives >= 0 && scored > 0 && sequence.written() == 0) {
    planned_.scored.push_back({&sequence, first, sequence.cached, scored});
  }
  for (int64_t i = sequence.cached; i < sequence.cached + count; ++i) {
    rows.tokens.push_back(sequence.context()[size_t(i)]);
    rows.sequences.push_back(planned_.num_sequences);
    rows.positions.push_back(int32_t(i));
  }
  add_pages(sequence);
  sequence.cached += count;
  if (sequence.left() == 0) choose_last_row(sequence);
}

void Engine::add_unknown_row(Sequence& sequence, int32_t chosen) {
  StepRows& rows = planned_.rows;
  rows.tokens.push_back(-1 - chosen);
  rows.sequences.push_back(planned_.num_sequences);
  rows.positions.push_back(int32_t(sequence.cached));
  add_pages(sequence);
  ++sequence.cached;
  choose_last_row(sequence);
}

void Engine::add_pages(const Sequence& sequence) {
  StepRows& rows = planned_.rows;
  ++planned_.num_sequences;
  rows.pages.insert(rows.pages.end(), sequence.pages.begin(), sequence.pages.end());
  rows.pages.resize(size_t(planned_.num_sequences * pages_of(model_.cache.max_tokens())));
}

void Engine::choose_last_row(Sequence& sequence) {
  StepRows& rows = planned_.rows;
  rows.chosen.push_back(int32_t(rows.tokens.size()) - 1);
  if (sequence.request.needs_logits()) rows.read.push_back(int32_t(rows.chosen.size()) - 1);
  rows.options.push_back(
      sample_options(sequence.request.sampling, sequence.written() + uint64_t(sequence.unknown())));
  planned_.chosen.push_back(&sequence);
}

}  // namespace tandem
