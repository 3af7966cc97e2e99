#include "engine/infer/replicated_rows.h"

#include "kernels/elementwise.h"
#include "kernels/embedding.h"
#include "tandem/collectives.h"

namespace tandem {

ReplicatedRows::ReplicatedRows(const DecoderContext& c, int64_t rows, int chunks,
                               StepMemory& memory, StepExperts* experts)
    : context_(c), memory_(memory), experts_(experts), chunks_(size_t(chunks)) {
  if (!c.forms().has_row_sums) return;
  for (Chunk& chunk : chunks_) {
    chunk.sums = std::make_unique<RowSums>(c.tp, c.dtype, shard_of(rows, chunks, 0).count,
                                           c.config.hidden, row_sum_wires(c));
  }
}

bool ReplicatedRows::adds_in_gemm() const {
  return context_.forms().fuses_additions && context_.tp.size() == 1;
}

template <typename Compute>
void ReplicatedRows::sum(Chunk& chunk, const Wire& wire, const Compute& compute) {
  if (chunk.sums) {
    compute(chunk.sums->begin(chunk.rows.count));
    chunk.sums->send(wire);
    chunk.is_sent = true;
  } else {
    compute(chunk.residuals.sum);
    all_reduce(context_.tp, chunk.residuals.sum, wire);
  }
}

void ReplicatedRows::take_sum(Chunk& chunk) {
  if (!chunk.is_sent) return;
  chunk.sums->finish(chunk.residuals.sum);
  chunk.is_sent = false;
  finish_sum(chunk);
}

void ReplicatedRows::finish_sum(Chunk& chunk) {
  if (!chunk.sum_of) return;
  program::finish_sum(context_.view(), *chunk.sum_of, {}, chunk.residuals.sum);
  chunk.sum_of = nullptr;
}

/// A chunk's sums are in flight until its next branch, when the other chunks' are advanced between
/// its GEMMs.
struct ReplicatedRows::Steps {
  ReplicatedRows& all;
  size_t branch;
  Chunk& chunk;

  const DecoderContext& context() const { return all.context_; }
  const BranchLayout& layout() const { return context().layout.branches[branch]; }
  void in(const Tensor& x_norm, const LayerWeight& weight, const Tensor& hidden) const {
    multiply(context(), x_norm, weight, hidden, all.memory_.same_bits);
    all.advance_other_chunks(chunk);
  }
  void sum_over_ranks(const Tensor& terms) const { all_reduce(context().tp, terms); }
  void attention(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out,
                 const Tensor& sinks) const {
    context().cache.attend(branch, chunk.rows.begin, q, k, v, out, sinks);
  }
  void out(const Tensor& inner, const LayerWeight& weight) const {
    const DecoderContext& c = context();
    if (all.adds_in_gemm() && !layout().program.finishes_sum()) {
      return multiply(c, inner, weight, chunk.residuals.x, all.memory_.same_bits, true);
    }
    all.advance_other_chunks(chunk);
    all.sum(chunk, branch_wire(c.codec, layout()), [&](const Tensor& partial) {
      multiply(c, inner, weight, partial, all.memory_.same_bits);
    });
    chunk.sum_of = &layout();
    if (!chunk.is_sent) all.finish_sum(chunk);
    // Experts add to the stream before the next norm does.
    chunk.residuals.add_sum(c, chunk.is_sent || (c.forms().fuses_additions && !layout().moe));
  }
  void experts(const Tensor& x_norm, const Tensor& w_in, const Tensor& w_out) const {
    all.take_sum(chunk);
    chunk.residuals.finish(context());
    if (!context().coded) {
      return all.experts_->add_to_all(layout(), x_norm, w_in, w_out, chunk.residuals.x);
    }
    all.advance_other_chunks(chunk);
    all.sum(chunk, context().codec.experts, [&](const Tensor& partial) {
      all.experts_->compute_partial(layout(), x_norm, partial);
    });
    chunk.residuals.add_sum(context(), chunk.is_sent);
  }
};

void ReplicatedRows::run(const Tensor& tokens, int64_t count) {
  const auto chunks = int(chunks_.size());
  for (int i = 0; i < chunks; ++i) {
    Chunk& chunk = chunks_[size_t(i)];
    chunk.rows = shard_of(count, chunks, i);
    const auto rows_of = [&](const Activation& all) {
      return all->rows(chunk.rows.begin, chunk.rows.count);
    };
    chunk.residuals = {rows_of(memory_.x), rows_of(memory_.sum)};
    look_up(chunk, tokens);
  }
  for (size_t branch = 0; branch < context_.layout.branches.size(); ++branch) {
    for (Chunk& chunk : chunks_) {
      if (branch == 0) {
        take_sum(chunk);
        cast(context_.exec, chunk.residuals.sum, chunk.residuals.x);
      }
      run_branch(branch, chunk);
    }
  }
  for (Chunk& chunk : chunks_) {
    take_sum(chunk);
    chunk.residuals.finish(context_);
  }
}

/// Rows of the embedding held by other ranks are 0 here.
void ReplicatedRows::look_up(Chunk& chunk, const Tensor& tokens) {
  const DecoderContext& c = context_;
  sum(chunk, c.codec.embeddings, [&](const Tensor& partial) {
    embedding_forward(c.exec, tokens.narrow(0, chunk.rows.begin, chunk.rows.count),
                      c.weights.matrix(c.layout.embedding), c.layout.vocab_begin, partial);
  });
}

void ReplicatedRows::run_branch(size_t branch, Chunk& chunk) {
  const DecoderContext& c = context_;
  const BranchLayout& b = c.layout.branches[branch];
  const program::Values values = branch_values(b, memory_, chunk.rows.count, chunk.rows.count);
  take_sum(chunk);
  chunk.residuals.norm(c, b, values);
  const Steps steps{*this, branch, chunk};
  if (b.is_mlp() && multiply_swiglu(c, values[program::kXNorm], c.view().weight(b.in),
                                    values[program::kInner], memory_.same_bits)) {
    return steps.out(values[program::kInner], c.view().weight(b.out));
  }
  forward_branch(c.view(), b, values, steps);
}

void ReplicatedRows::advance_other_chunks(const Chunk& chunk) {
  for (const Chunk& other : chunks_) {
    if (&other != &chunk && other.is_sent) other.sums->advance();
  }
}

void ReplicatedRows::gather(const Tensor& chosen, const Tensor& out) {
  embedding_forward(context_.exec, chosen, memory_.x, 0, out);
}

}  // namespace tandem
