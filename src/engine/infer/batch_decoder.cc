#include "engine/infer/batch_decoder.h"

#include <algorithm>
#include <numeric>
#include <set>

#include "engine/infer/decoder_parts.h"
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

Activation bytes(const DecoderContext& c, int64_t rows, int64_t columns) {
  return Activation(DType::u8, rows, columns, c.exec.device);
}

}  // namespace

BatchDecoder::BatchDecoder(const DecoderContext& c, int64_t rows, int64_t chosen,
                           const OverlapOptions& overlap)
    : context_(c),
      progress_(c.tp, "decode"),
      max_rows_(rows),
      max_chosen_(chosen),
      inputs_(bytes(c, 1, chosen * kChosenBytes + rows * kTokenBytes)),
      upload_(c.exec, inputs_->bytes()),
      host_inputs_(inputs_->bytes()),
      x_(c.f32(rows, c.config.hidden)),
      inverse_rms_(c.f32(1, std::max(rows, chosen))),
      x_norm_(c.activation(rows, c.config.hidden)),
      hidden_(c.activation(rows, widest_in(c.layout))),
      inner_(c.activation(rows, widest_inner(c.layout))),
      residual_(c.activation(rows, c.config.hidden)),
      last_(c.f32(chosen, c.config.hidden)),
      last_norm_(c.activation(chosen, c.config.hidden)),
      local_logits_(c.f32(chosen, logit_columns(c))),
      gathered_(c.f32(c.tp.size() * chosen, c.tp.size() == 1 ? 0 : logit_columns(c))),
      logits_(c.f32(chosen, c.tp.size() == 1 ? 0 : c.config.vocab)),
      sample_scratch_(bytes(c, chosen, sample_scratch(c.exec, c.config.vocab))),
      sampled_(bytes(c, chosen, sizeof(Sampled))),
      host_sampled_(size_t(chosen)) {
  if (c.forms().has_row_sums) {
    sums_.emplace(c.tp, c.dtype, rows, c.config.hidden, row_sum_wires(c));
  }
  if (!c.forms().has_row_sums && c.tp.size() > 1 && rows >= kMinSplitRows) {
    split_.emplace(c, rows, overlap, hidden_, inner_);
  }
  if (c.config.moe_layers() > 0 && c.int8) {
    row_experts_.emplace(c, rows);
  } else if (c.config.moe_layers() > 0) {
    experts_.emplace(c, rows, true, overlap);
  }
  if (times_algorithms(c.exec)) run_all_sizes();
}

/// Rows of a step of any tokens: in f32, and up to `chosen`, each by itself, else in chunks of a
/// page.
BatchRows BatchDecoder::dummy_rows(int64_t count) const {
  const int64_t capacity = context_.cache.max_tokens();
  const int64_t of_chunk = std::min(kPageTokens, capacity);
  BatchRows rows;
  rows.tokens.assign(size_t(count), 0);
  rows.sequences.assign(size_t(count), 0);
  rows.pages.assign(size_t(pages_of(capacity)), 0);
  for (int64_t i = 0; i < count; ++i) rows.positions.push_back(int32_t(i % of_chunk));
  for (int64_t i = 0; count > max_chosen_ && i < count; i += of_chunk) {
    rows.chunks.push_back({i, std::min(of_chunk, count - i)});
  }
  rows.chosen.resize(size_t(std::min(count, max_chosen_)));
  std::iota(rows.chosen.begin(), rows.chosen.end(), 0);
  rows.options.resize(rows.chosen.size());
  return rows;
}

void BatchDecoder::run_all_sizes() {
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

bool BatchDecoder::is_split(int64_t count) const {
  return split_ && split_->takes(count);
}

bool BatchDecoder::adds_in_gemm() const {
  return context_.forms().fuses_additions && context_.tp.size() == 1;
}

template <typename Compute>
void BatchDecoder::sum(int64_t rows, const Wire& wire, const Compute& compute) {
  const Tensor residual = residual_->rows(0, rows);
  if (sums_) {
    compute(sums_->begin(rows));
    sums_->send(wire);
    sums_->finish(residual);
  } else {
    compute(residual);
    all_reduce(context_.tp, residual, wire);
  }
}

/// Every rank has all rows, except in the experts, to which it sends its share of the rows.
struct BatchDecoder::Steps {
  BatchDecoder& decoder;
  size_t branch;
  Residuals& residuals;

  const BranchLayout& layout() const { return decoder.context_.layout.branches[branch]; }
  void in(const Tensor& x_norm, const LayerWeight& weight, const Tensor& hidden) const {
    multiply(decoder.context_, x_norm, weight, hidden);
  }
  void attention(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out) const {
    decoder.context_.cache.attend(branch, 0, q, k, v, out);
  }
  void out(const Tensor& inner, const LayerWeight& weight) const {
    const DecoderContext& c = decoder.context_;
    if (decoder.adds_in_gemm() && !layout().program.finishes_sum()) {
      GemmOptions options = kWeightIsOld;
      options.accumulate = true;
      return gemm(c.exec, inner, weight.values.transposed(), residuals.x, options);
    }
    decoder.sum(residuals.x.dim(0), branch_wire(c.codec, layout()),
                [&](const Tensor& partial) { multiply(c, inner, weight, partial); });
    program::finish_sum(c.view(), layout(), residuals.sum);
    residuals.add_sum(c, c.forms().fuses_additions && !layout().moe);
  }
  void experts(const Tensor& x_norm, const Tensor& w_in, const Tensor& w_out) const {
    if (decoder.experts_)
      return decoder.experts_->run_shared(layout(), x_norm, w_in, w_out, residuals.x);
    decoder.sum(residuals.x.dim(0), decoder.context_.codec.experts, [&](const Tensor& partial) {
      decoder.row_experts_->run(layout(), x_norm, partial);
    });
    residuals.add_sum(decoder.context_, false);
  }
};

std::span<const Sampled> BatchDecoder::run(const BatchRows& rows) {
  const auto count = int64_t(rows.tokens.size()), chosen = int64_t(rows.chosen.size());
  const DecoderContext& c = context_;
  c.cache.set_rows(rows.sequences, rows.positions, rows.pages, rows.chunks);
  num_rows_ = count;
  num_chosen_ = chosen;
  return progress_.during([&]() -> std::span<const Sampled> {
    upload(rows);
    if (rows.chunks.empty()) {
      const auto deadline_us = int64_t(c.tp.deadline() * 1e6);
      replay_.run(c.exec, {count, chosen, c.cache.longest(), deadline_us},
                  [&] { run_rows(count, chosen); });
    } else {
      run_rows(count, chosen);
    }
    const std::span<Sampled> result = std::span(host_sampled_).first(size_t(chosen));
    if (chosen > 0) {
      copy(c.exec, sampled_->rows(0, chosen),
           Tensor(result.data(), DType::u8, {chosen, int64_t(sizeof(Sampled))}));
    }
    return result;
  });
}

void BatchDecoder::upload(const BatchRows& rows) {
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

Tensor BatchDecoder::input(int64_t begin, int64_t count) const {
  return Tensor(inputs_->as<uint8_t>() + begin, DType::u8, {count}, context_.exec.device);
}

Tensor BatchDecoder::tokens(int64_t count) const {
  const Tensor bytes = input(max_chosen_ * kChosenBytes, count * kTokenBytes);
  return Tensor(bytes.data(), DType::i32, {count}, bytes.device());
}

Tensor BatchDecoder::chosen_rows(int64_t count) const {
  const Tensor bytes = input(max_chosen_ * kOptionBytes, count * kTokenBytes);
  return Tensor(bytes.data(), DType::i32, {count}, bytes.device());
}

Tensor BatchDecoder::options(int64_t count) const {
  return Tensor(inputs_->data(), DType::u8, {count, kOptionBytes}, inputs_->device());
}

std::vector<float> BatchDecoder::read_logits(size_t chosen) const {
  std::vector<float> result(size_t(context_.config.vocab));
  copy(context_.exec, logits(num_chosen_).rows(int64_t(chosen), 1),
       Tensor(result.data(), DType::f32, {1, context_.config.vocab}));
  return result;
}

std::vector<float> BatchDecoder::compute_logits_after(int64_t row, int64_t count) {
  const Exec& exec = context_.exec;
  const int64_t vocab = context_.config.vocab, size = count * kTokenBytes;
  std::vector<int32_t> rows(static_cast<size_t>(count));
  std::iota(rows.begin(), rows.end(), int32_t(row));
  const auto* const bytes = reinterpret_cast<const uint8_t*>(rows.data());
  return progress_.during([&] {
    upload_.run(exec, Tensor::of(std::span(bytes, size_t(size)), {size}),
                input(max_chosen_ * kOptionBytes, size));
    gather_chosen(num_rows_, count);
    compute_logits(count);
    std::vector<float> result(size_t(count * vocab));
    copy(exec, logits(count), Tensor(result.data(), DType::f32, {count, vocab}));
    return result;
  });
}

void BatchDecoder::run_rows(int64_t count, int64_t chosen) {
  const DecoderContext& c = context_;
  if (is_split(count)) {
    const Tensor embeddings = residual_->rows(0, split_->rows());
    embedding_forward(c.exec, tokens(split_->rows()), c.weights.matrix(c.layout.embedding),
                      c.layout.vocab_begin, embeddings);
    split_->run(embeddings, count, experts_ ? &*experts_ : nullptr);
  } else {
    look_up(count);
    run_branches(count);
  }
  if (chosen == 0) return;
  gather_chosen(count, chosen);
  compute_logits(chosen);
  sample_rows(context_.exec, logits(chosen), options(chosen), sample_scratch_->rows(0, chosen),
              sampled_->rows(0, chosen));
}

void BatchDecoder::look_up(int64_t count) {
  const DecoderContext& c = context_;
  sum(count, c.codec.embeddings, [&](const Tensor& partial) {
    embedding_forward(c.exec, tokens(count), c.weights.matrix(c.layout.embedding),
                      c.layout.vocab_begin, partial);
  });
  cast(c.exec, residual_->rows(0, count), x_->rows(0, count));
}

void BatchDecoder::run_branches(int64_t count) {
  const DecoderContext& c = context_;
  Residuals residuals{x_->rows(0, count), residual_->rows(0, count)};
  for (size_t i = 0; i < c.layout.branches.size(); ++i) {
    const BranchLayout& b = c.layout.branches[i];
    const program::Values values =
        branch_values(b, x_norm_->rows(0, count), inverse_rms_, hidden_, inner_, count);
    const Tensor &x_norm = values[program::kXNorm], &inner = values[program::kInner];
    residuals.norm(c, b, values);
    const Steps steps{*this, i, residuals};
    if (b.is_mlp() && gemm_swiglu(c.exec, x_norm, c.weights.matrix(b.in), inner)) {
      steps.out(inner, c.view().weight(b.out));
    } else {
      forward_branch(c.view(), b, values, steps);
    }
  }
  residuals.finish(c);
}

void BatchDecoder::gather_chosen(int64_t count, int64_t chosen) {
  const Tensor last = last_->rows(0, chosen);
  if (is_split(count)) return split_->gather(chosen_rows(chosen), last);
  embedding_forward(context_.exec, chosen_rows(chosen), x_, 0, last);
}

void BatchDecoder::compute_logits(int64_t count) {
  const DecoderContext& c = context_;
  const Tensor last = last_->rows(0, count), last_norm = last_norm_->rows(0, count);
  rms_norm_forward(c.exec, last, c.weights.vector(c.layout.final_norm, c.config.hidden),
                   c.config.stream_eps(), last_norm, inverse_rms_);
  multiply(c, last_norm, c.view().weight(c.layout.head),
           reshaped(local_logits_, count, c.layout.vocab));
  scale_logits(c.view(), reshaped(local_logits_, count, c.layout.vocab));
  const int world = c.tp.size();
  if (world == 1) return;
  const int64_t room = count * logit_columns(c);
  const Tensor all = reshaped(gathered_, world, room);
  all_gather(c.tp, reshaped(local_logits_, 1, room), all);
  for (int rank = 0; rank < world; ++rank) {
    const Shard columns = shard_of(c.config.vocab, world, rank);
    cast(c.exec, reshaped(all.rows(rank, 1), count, columns.count),
         logits_->rows(0, count).narrow(1, columns.begin, columns.count));
  }
}

Tensor BatchDecoder::logits(int64_t chosen) const {
  const DecoderContext& c = context_;
  return c.tp.size() == 1 ? reshaped(local_logits_, chosen, c.layout.vocab)
                          : logits_->rows(0, chosen);
}

}  // namespace tandem
