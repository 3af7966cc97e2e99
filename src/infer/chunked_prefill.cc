#include "infer/chunked_prefill.h"

#include <algorithm>

#include "gemm/gemm.h"
#include "infer/decoder_parts.h"
#include "kernels/elementwise.h"
#include "kernels/embedding.h"

namespace tandem {

ChunkedPrefill::ChunkedPrefill(const DecoderContext& c, int64_t rows, int chunks)
    : context_(c),
      progress_(c.tp, "prefill"),
      x_(DType::f32, rows, c.config.hidden),
      inverse_rms_(DType::f32, 1, rows),
      normed_(c.dtype, shard_of(rows, chunks, 0).count, c.config.hidden),
      hidden_(c.dtype, normed_->dim(0), widest_in(c.layout)),
      inner_(c.dtype, normed_->dim(0), widest_inner(c.layout)),
      residual_(c.dtype, normed_->dim(0), c.config.hidden) {
  for (int chunk = 0; chunk < chunks; ++chunk) {
    sums_.push_back(
        std::make_unique<RowSums>(c.tp, c.dtype, normed_->dim(0), c.config.hidden,
                                  std::vector{c.codec.attention, c.codec.mlp, c.codec.embeddings}));
  }
}

void ChunkedPrefill::run(std::span<const int32_t> tokens, int64_t position, const Tensor& last) {
  const auto count = int64_t(tokens.size());
  const int chunks = int(std::min<int64_t>(int64_t(sums_.size()), count));
  rows_.clear();
  for (int chunk = 0; chunk < chunks; ++chunk) rows_.push_back(shard_of(count, chunks, chunk));
  progress_.during([&] {
    for (int chunk = 0; chunk < chunks; ++chunk) look_up(chunk, tokens);
    for (size_t branch = 0; branch < context_.layout.branches.size(); ++branch) {
      for (int chunk = 0; chunk < chunks; ++chunk) {
        take_sums(chunk, branch == 0);
        run_branch(branch, chunk, position);
      }
    }
    for (int chunk = 0; chunk < chunks; ++chunk) take_sums(chunk, false);
  });
  cast(x_->rows(count - 1, 1), last);
}

/// Rows of the embedding that other ranks hold are 0 here.
void ChunkedPrefill::look_up(int chunk, std::span<const int32_t> tokens) {
  const DecoderContext& c = context_;
  const Shard& rows = rows_[size_t(chunk)];
  RowSums& sums = *sums_[size_t(chunk)];
  embedding_forward(tokens.subspan(size_t(rows.begin), size_t(rows.count)),
                    c.weights.matrix(c.layout.embedding), c.layout.vocab_begin,
                    sums.begin(rows.count));
  sums.send(c.codec.embeddings);
}

void ChunkedPrefill::take_sums(int chunk, bool is_first) {
  const Shard& rows = rows_[size_t(chunk)];
  const Tensor residual = residual_->rows(0, rows.count), x = x_->rows(rows.begin, rows.count);
  sums_[size_t(chunk)]->finish(residual);
  is_first ? cast(residual, x) : add(x, residual, x);
}

void ChunkedPrefill::run_branch(size_t branch, int chunk, int64_t position) {
  const DecoderContext& c = context_;
  const BranchLayout& b = c.layout.branches[branch];
  const Shard& rows = rows_[size_t(chunk)];
  const Tensor normed = normed_->rows(0, rows.count);
  const Tensor hidden = reshaped(hidden_, rows.count, b.in.rows);
  const Tensor inner = reshaped(inner_, rows.count, b.out.columns);
  run_norm(c, b, x_->rows(rows.begin, rows.count), inverse_rms_->as<float>(), normed);
  gemm(normed, c.weights.matrix(b.in).transposed(), hidden);
  advance_others(chunk);
  run_inner(c, branch, hidden, position + rows.begin, rows.count, inner);
  advance_others(chunk);
  RowSums& sums = *sums_[size_t(chunk)];
  gemm(inner, c.weights.matrix(b.out).transposed(), sums.begin(rows.count));
  sums.send(wire_of(c.codec, b));
}

void ChunkedPrefill::advance_others(int chunk) {
  for (size_t other = 0; other < rows_.size(); ++other) {
    if (other != size_t(chunk)) sums_[other]->advance();
  }
}

}  // namespace tandem
