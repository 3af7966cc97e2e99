#include "engine/infer/decoder.h"

#include <algorithm>
#include <iterator>
#include <numeric>
#include <set>

#include "gemm/gemm.h"
#include "kernels/elementwise.h"
#include "kernels/embedding.h"
#include "kernels/norm.h"
#include "tandem/collectives.h"
#include "tune/gemm_choices.h"

namespace tandem {
namespace {

/// Columns of a rank's logits in the gathered ones: the max over the ranks.
int64_t logit_columns(const DecoderContext& c) {
  return shard_of(c.config.vocab, c.tp.size(), 0).count;
}

// Inputs of a step: [options | numbers of the chosen rows | tokens].
constexpr int64_t kOptionBytes = sizeof(SampleOptions), kTokenBytes = sizeof(int32_t);
constexpr int64_t kChosenBytes = kOptionBytes + kTokenBytes;

std::vector<int32_t> first_rows(int64_t count) {
  std::vector<int32_t> rows(static_cast<size_t>(count));
  std::iota(rows.begin(), rows.end(), 0);
  return rows;
}

constexpr size_t kPinnedPage = 4096;

size_t whole_pages(size_t bytes) {
  return (bytes + kPinnedPage - 1) / kPinnedPage * kPinnedPage;
}

Activation bytes(const DecoderContext& c, int64_t rows, int64_t columns) {
  return Activation(DType::u8, rows, columns, c.exec.device);
}

}  // namespace

Decoder::Result::Result(const Exec& exec, int64_t max_chosen)
    : memory(whole_pages(size_t(max_chosen) * sizeof(Sampled)) + kPinnedPage),
      tokens(reinterpret_cast<Sampled*>(whole_pages(reinterpret_cast<uintptr_t>(memory.data())))),
      download(exec, tokens, memory.bytes() - kPinnedPage) {}

Decoder::Decoder(const DecoderContext& c, int64_t rows, int64_t chosen, const RowsOptions& options)
    : context_(c),
      progress_(c.tp, "decode"),
      max_rows_(rows),
      max_chosen_(chosen),
      takes_turns_(options.batch_invariant && !c.forms().has_row_sums),
      memory_(c, rows),
      experts_(c.has_experts() ? std::make_unique<StepExperts>(c, rows, options.overlap) : nullptr),
      small_(c, rows, 1, memory_, experts_.get()),
      large_(choose_rows(c, rows, options, memory_, experts_.get())),
      inputs_(bytes(c, 1, chosen * kChosenBytes + rows * kTokenBytes)),
      upload_(c.exec, inputs_->bytes()),
      host_inputs_(inputs_->bytes()),
      last_(c.f32(chosen, c.config.hidden)),
      last_norm_(c.activation(chosen, c.config.hidden)),
      last_rms_(c.f32(1, chosen)),
      local_logits_(c.f32(chosen, logit_columns(c))),
      gathered_(c.f32(c.tp.size() * chosen, c.tp.size() == 1 ? 0 : logit_columns(c))),
      logits_(c.f32(chosen, c.tp.size() == 1 ? 0 : c.config.vocab)),
      sample_scratch_(bytes(c, chosen, sample_scratch(c.exec, c.config.vocab))),
      sampled_(bytes(c, chosen, sizeof(Sampled))),
      results_{Result(c.exec, chosen), Result(c.exec, chosen)},
      sampler_(c.tp, c.config.vocab) {
  if (options.batch_invariant) check_batch_invariant(c, chosen);
  clear(c.exec, inputs_);  // tokens of padding
  if (times_algorithms(c.exec)) run_all_sizes();
}

/// Rows of a step of any tokens: in f32, and up to `chosen`, each by itself, else in chunks of a
/// page.
StepRows Decoder::dummy_rows(int64_t count) const {
  const int64_t capacity = context_.cache.max_tokens();
  const int64_t of_chunk = std::min(kPageTokens, capacity);
  StepRows rows;
  rows.tokens.assign(size_t(count), 0);
  rows.sequences.assign(size_t(count), 0);
  rows.pages.assign(size_t(pages_of(capacity)), 0);
  for (int64_t i = 0; i < count; ++i) rows.positions.push_back(int32_t(i % of_chunk));
  for (int64_t i = 0; count > max_chosen_ && i < count; i += of_chunk) {
    rows.chunks.push_back({i, std::min(of_chunk, count - i)});
  }
  rows.chosen = first_rows(std::min(count, max_chosen_));
  rows.options.resize(rows.chosen.size());
  return rows;
}

void Decoder::run_all_sizes() {
  share_gemm_choices(context_.tp);
  std::set<int64_t> sizes;
  for (int64_t rows = 1; rows < max_rows_; rows = timed_gemm_rows(rows) + 1) {
    sizes.insert(std::min(max_rows_, timed_gemm_rows(rows)));
    if (rows <= max_chosen_) sizes.insert(std::min(max_chosen_, timed_gemm_rows(rows)));
  }
  sizes.insert(max_rows_);
  for (const int64_t rows : sizes) run(dummy_rows(rows));
  agree_on_gemm_choices(context_.tp);
}

RowRunner& Decoder::runner_of(int64_t count, bool has_prompts) {
  // On CPU ranks other steps are in the context's wire formats.
  const bool may_be_large = has_prompts || !context_.forms().has_row_sums;
  if (may_be_large && large_.runner && large_.runner->takes(count)) return *large_.runner;
  return small_;
}

void Decoder::launch(const StepRows& rows) {
  const auto count = int64_t(rows.tokens.size()), chosen = int64_t(rows.chosen.size());
  const DecoderContext& c = context_;
  c.cache.set_rows(rows.sequences, rows.positions, rows.pages, rows.chunks);
  read_ = rows.read;
  const bool is_fed = std::ranges::any_of(rows.tokens, [](int32_t token) { return token < 0; });
  if (takes_turns_) {
    memory_.same_bits = rows.chunks.empty() ? SameBits::few_rows : SameBits::many_rows;
  }
  progress_.during([&] {
    upload(rows);
    runner_ = &runner_of(count, !rows.chunks.empty());
    last_launched().download.block(c.exec);  // sampled_ is written again
    const bool runs_form = !large_.runner || runner_ == large_.runner.get();
    if (large_.receipt && !rows.chunks.empty() && runs_form) ++large_.receipt->calls;
    if (rows.chunks.empty()) {
      const auto deadline_us = int64_t(c.tp.deadline() * 1e6);
      replay_.run(c.exec,
                  {2 * count + is_fed, chosen, c.cache.longest(), c.cache.distinct_sequences(),
                   deadline_us},
                  [&] { run_rows(count, chosen, is_fed); });
    } else {
      run_rows(count, chosen, is_fed);
    }
    fetch(chosen);
  });
}

const Decoder::Result& Decoder::last_launched() const {
  return results_[(num_launched_ + results_.size() - 1) % results_.size()];
}

void Decoder::fetch(int64_t chosen) {
  Result& result = results_[num_launched_++ % results_.size()];
  result.count = chosen;
  if (chosen == 0) return;
  const Tensor sampled = sampled_->rows(0, chosen);
  const Tensor host(result.tokens, DType::u8, {chosen, int64_t(sizeof(Sampled))});
  result.download.begin(context_.exec);
  // On the host the next step may be launched before these tokens are collected.
  if (result.download.fetch(context_.exec, sampled, host).data() != host.data()) {
    copy(context_.exec, sampled, host);
  }
  result.download.end();
}

std::span<const Sampled> Decoder::collect() {
  const Result& result = results_[num_collected_++ % results_.size()];
  if (result.count > 0) progress_.during([&] { result.download.wait(); });
  return {result.tokens, size_t(result.count)};
}

void Decoder::upload(const StepRows& rows) {
  const auto store = [&](int64_t at, const auto& values) {
    std::ranges::copy(std::as_bytes(std::span(values)), host_inputs_.begin() + at);
  };
  store(0, rows.options);
  store(max_chosen_ * kOptionBytes, rows.chosen);
  store(max_chosen_ * kChosenBytes, rows.tokens);
  const int64_t used = max_chosen_ * kChosenBytes + int64_t(rows.tokens.size()) * kTokenBytes;
  const auto* const bytes = reinterpret_cast<const uint8_t*>(host_inputs_.data());
  upload_.run(context_.exec, Tensor::of(std::span(bytes, size_t(used)), {used}), input(0, used));
}

Tensor Decoder::input(int64_t begin, int64_t count) const {
  return Tensor(inputs_->as<uint8_t>() + begin, DType::u8, {count}, context_.exec.device);
}

Tensor Decoder::tokens(int64_t count) const {
  const Tensor bytes = input(max_chosen_ * kChosenBytes, count * kTokenBytes);
  return Tensor(bytes.data(), DType::i32, {count}, bytes.device());
}

Tensor Decoder::chosen_rows(int64_t count) const {
  const Tensor bytes = input(max_chosen_ * kOptionBytes, count * kTokenBytes);
  return Tensor(bytes.data(), DType::i32, {count}, bytes.device());
}

Tensor Decoder::options(int64_t count) const {
  return Tensor(inputs_->data(), DType::u8, {count, kOptionBytes}, inputs_->device());
}

std::vector<float> Decoder::read_logits(size_t chosen) const {
  std::vector<float> result(size_t(context_.config.vocab));
  copy(context_.exec, whole_row(int32_t(chosen)),
       Tensor(result.data(), DType::f32, {1, context_.config.vocab}));
  return result;
}

std::vector<float> Decoder::compute_logits_after(int64_t row, int64_t count) {
  const Exec& exec = context_.exec;
  const int64_t vocab = context_.config.vocab, size = count * kTokenBytes;
  std::vector<int32_t> rows(static_cast<size_t>(count));
  std::iota(rows.begin(), rows.end(), int32_t(row));
  const auto* const bytes = reinterpret_cast<const uint8_t*>(rows.data());
  return progress_.during([&] {
    upload_.run(exec, Tensor::of(std::span(bytes, size_t(size)), {size}),
                input(max_chosen_ * kOptionBytes, size));
    runner_->gather(chosen_rows(count), last_->rows(0, count));
    compute_logits(count);
    gather_logits(first_rows(count));
    std::vector<float> result(size_t(count * vocab));
    copy(exec, logits(count), Tensor(result.data(), DType::f32, {count, vocab}));
    return result;
  });
}

void Decoder::run_rows(int64_t count, int64_t chosen, bool is_fed) {
  if (is_fed) feed_tokens(context_.exec, sampled_, tokens(count));
  runner_->run(tokens(max_rows_), count);
  if (chosen == 0) return;
  runner_->gather(chosen_rows(chosen), last_->rows(0, chosen));
  compute_logits(chosen);
  if (context_.forms().samples_shards) return sample_shards(chosen);
  gather_logits(first_rows(chosen));
  sample_rows(context_.exec, logits(chosen), options(chosen), sample_scratch_->rows(0, chosen),
              sampled_->rows(0, chosen));
}

void Decoder::sample_shards(int64_t chosen) {
  const std::span rows_options(options(chosen).as<const SampleOptions>(), size_t(chosen));
  const std::span sampled(sampled_->as<Sampled>(), size_t(chosen));
  const std::vector<int32_t> left = sampler_.run(local_logits(chosen), rows_options, sampled);
  std::vector<int32_t> rows;
  std::ranges::set_union(left, read_, std::back_inserter(rows));
  gather_logits(rows);
  for (const int32_t row : left) {
    const std::span whole(whole_row(row).as<const float>(), size_t(context_.config.vocab));
    sampled[size_t(row)] = sample_row(whole, rows_options[size_t(row)]);
  }
}

void Decoder::compute_logits(int64_t count) {
  const DecoderContext& c = context_;
  const Tensor last = last_->rows(0, count), last_norm = last_norm_->rows(0, count);
  rms_norm_forward(c.exec, last, c.view().final_norm(), c.config.stream_eps(), last_norm,
                   last_rms_);
  multiply(c, last_norm, c.view().weight(c.layout.head), local_logits(count),
           takes_turns_ ? SameBits::few_rows : SameBits::no);
  finish_logits(c.view(), local_logits(count));
}

Tensor Decoder::local_logits(int64_t count) const {
  return reshaped(local_logits_, count, context_.layout.vocab);
}

void Decoder::gather_logits(std::span<const int32_t> rows) {
  const DecoderContext& c = context_;
  const int world = c.tp.size();
  gathered_rows_.assign(rows.begin(), rows.end());
  if (world == 1 || rows.empty()) return;
  const Tensor local = local_logits(max_chosen_);
  for (size_t i = 0; i < rows.size(); ++i) {
    if (size_t(rows[i]) != i) cast(c.exec, local.rows(rows[i], 1), local.rows(int64_t(i), 1));
  }
  const auto count = int64_t(rows.size());
  const int64_t room = count * logit_columns(c);
  const Tensor all = reshaped(gathered_, world, room);
  all_gather(c.tp, reshaped(local_logits_, 1, room), all);
  gathered_bytes_ += room * int64_t(sizeof(float));
  for (int rank = 0; rank < world; ++rank) {
    const Shard columns = shard_of(c.config.vocab, world, rank);
    cast(c.exec, reshaped(all.rows(rank, 1), count, columns.count),
         logits_->rows(0, count).narrow(1, columns.begin, columns.count));
  }
}

Tensor Decoder::logits(int64_t count) const {
  return context_.tp.size() == 1 ? local_logits(count) : logits_->rows(0, count);
}

Tensor Decoder::whole_row(int32_t row) const {
  // With one rank, and in steps that sample from whole rows, all are at their positions.
  if (context_.tp.size() == 1 || !context_.forms().samples_shards) {
    return logits(max_chosen_).rows(row, 1);
  }
  const auto at = std::ranges::find(gathered_rows_, row) - gathered_rows_.begin();
  return logits_->rows(at, 1);
}

}  // namespace tandem
