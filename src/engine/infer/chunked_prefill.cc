#include "engine/infer/chunked_prefill.h"

#include <algorithm>

#include "engine/infer/decoder_parts.h"
#include "gemm/gemm.h"
#include "kernels/elementwise.h"
#include "kernels/embedding.h"
#include "tandem/error.h"

namespace tandem {

ChunkedPrefill::ChunkedPrefill(const DecoderContext& c, int64_t rows, int chunks)
    : context_(c),
      progress_(c.tp, "prefill"),
      x_(DType::f32, rows, c.config.hidden),
      inverse_rms_(DType::f32, 1, rows),
      x_norm_(c.dtype, shard_of(rows, chunks, 0).count, c.config.hidden),
      hidden_(c.dtype, x_norm_->dim(0), widest_in(c.layout)),
      inner_(c.dtype, x_norm_->dim(0), widest_inner(c.layout)),
      residual_(c.dtype, x_norm_->dim(0), c.config.hidden) {
  for (int chunk = 0; chunk < chunks; ++chunk) {
    sums_.push_back(std::make_unique<RowSums>(c.tp, c.dtype, x_norm_->dim(0), c.config.hidden,
                                              row_sum_wires(c)));
  }
  if (c.int8 && c.config.moe_layers() > 0) experts_.emplace(c, x_norm_->dim(0));
}

/// Sends partial products to be summed during the computation of the other chunk, and advances the
/// other chunk's sums between this one's GEMMs.
struct ChunkedPrefill::Steps {
  ChunkedPrefill& block;
  size_t branch;
  int chunk;

  const Shard& rows() const { return block.rows_[size_t(chunk)]; }
  void in(const Tensor& x_norm, const LayerWeight& weight, const Tensor& hidden) {
    multiply(block.context_, x_norm, weight, hidden);
    block.advance_other_chunks(chunk);
  }
  void attention(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out) {
    block.context_.cache.attend(branch, rows().begin, q, k, v, out);
  }
  void out(const Tensor& inner, const LayerWeight& weight) {
    block.advance_other_chunks(chunk);
    RowSums& sums = *block.sums_[size_t(chunk)];
    multiply(block.context_, inner, weight, sums.begin(rows().count));
    sums.send(branch_wire(block.context_.codec, block.context_.layout.branches[branch]));
  }
  void experts(const Tensor& x_norm, const Tensor&, const Tensor&) {
    if (!block.experts_) {
      throw Unsupported("prefill in chunks: a model with experts: expected a dense one");
    }
    const BranchLayout& layout = block.context_.layout.branches[branch];
    if (layout.has_products()) block.take_sums(chunk, &layout);
    block.advance_other_chunks(chunk);
    RowSums& sums = *block.sums_[size_t(chunk)];
    block.experts_->run(layout, x_norm, sums.begin(rows().count));
    sums.send(block.context_.codec.experts);
  }
};

void ChunkedPrefill::run(std::span<const int32_t> tokens, int64_t position, const Tensor& last) {
  const auto count = int64_t(tokens.size());
  const int chunks = int(std::min<int64_t>(int64_t(sums_.size()), count));
  rows_.clear();
  for (int chunk = 0; chunk < chunks; ++chunk) rows_.push_back(shard_of(count, chunks, chunk));
  context_.cache.set_rows(position, count);
  progress_.during([&] {
    for (int chunk = 0; chunk < chunks; ++chunk) look_up(chunk, tokens);
    for (size_t branch = 0; branch < context_.layout.branches.size(); ++branch) {
      for (int chunk = 0; chunk < chunks; ++chunk) {
        take_sums(chunk, branch == 0 ? nullptr : &context_.layout.branches[branch - 1]);
        const BranchLayout& b = context_.layout.branches[branch];
        const Shard& rows = rows_[size_t(chunk)];
        forward_branch(context_.view(), b,
                       branch_values(b, x_norm_->rows(0, rows.count), inverse_rms_, hidden_, inner_,
                                     rows.count),
                       Steps{*this, branch, chunk}, x_->rows(rows.begin, rows.count));
      }
    }
    for (int chunk = 0; chunk < chunks; ++chunk) take_sums(chunk, &context_.layout.branches.back());
  });
  cast(context_.exec, x_->rows(count - 1, 1), last);
}

/// Rows of the embedding held by other ranks are 0 here.
void ChunkedPrefill::look_up(int chunk, std::span<const int32_t> tokens) {
  const DecoderContext& c = context_;
  const Shard& rows = rows_[size_t(chunk)];
  RowSums& sums = *sums_[size_t(chunk)];
  embedding_forward(c.exec, Tensor::of(tokens.data() + rows.begin, {rows.count}),
                    c.weights.matrix(c.layout.embedding), c.layout.vocab_begin,
                    sums.begin(rows.count));
  sums.send(c.codec.embeddings);
}

void ChunkedPrefill::take_sums(int chunk, const BranchLayout* of) {
  const Exec& exec = context_.exec;
  const Shard& rows = rows_[size_t(chunk)];
  const Tensor residual = residual_->rows(0, rows.count), x = x_->rows(rows.begin, rows.count);
  sums_[size_t(chunk)]->finish(residual);
  if (!of) return cast(exec, residual, x);
  program::finish_sum(context_.view(), *of, residual);
  add(exec, x, residual, x);
}

void ChunkedPrefill::advance_other_chunks(int chunk) {
  for (size_t other = 0; other < rows_.size(); ++other) {
    if (other != size_t(chunk)) sums_[other]->advance();
  }
}

}  // namespace tandem
