#include "engine/infer/batch_decoder.h"

#include <algorithm>

#include "engine/infer/decoder_parts.h"
#include "gemm/gemm.h"
#include "kernels/elementwise.h"
#include "kernels/embedding.h"
#include "tandem/collectives.h"

namespace tandem {
namespace {

/// Columns of a rank's logits in the gathered ones: the max over the ranks.
int64_t logit_columns(const DecoderContext& c) {
  return shard_of(c.config.vocab, c.tp.size(), 0).count;
}

Activation bytes(const DecoderContext& c, int64_t rows, int64_t columns) {
  return Activation(DType::u8, rows, columns, c.exec.device);
}

}  // namespace

BatchDecoder::BatchDecoder(const DecoderContext& c, int64_t rows, int64_t chosen,
                           const OverlapOptions& overlap)
    : context_(c),
      progress_(c.tp, "decode"),
      tokens_(c.exec, rows),
      chosen_(c.exec, chosen),
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
      options_(bytes(c, chosen, sizeof(SampleOptions))),
      sample_scratch_(bytes(c, chosen, sample_scratch(c.exec, c.config.vocab))),
      sampled_(bytes(c, chosen, sizeof(Sampled))),
      upload_options_(c.exec, options_->bytes()),
      host_sampled_(size_t(chosen)) {
  if (!c.exec.on_gpu()) {
    sums_.emplace(c.tp, c.dtype, rows, c.config.hidden,
                  std::vector{c.codec.attention, c.codec.mlp, c.codec.embeddings});
  }
  if (c.config.moe_layers() > 0) experts_.emplace(c, rows, true, overlap);
}

void BatchDecoder::multiply(const Tensor& x, const WeightMatrix& weight, const Tensor& out) {
  const DecoderContext& c = context_;
  if (c.int8) return c.int8->at(weight).multiply(x, out);
  gemm(c.exec, x, c.weights.matrix(weight).transposed(), out, kWeightIsOld);
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
  Tensor x;

  const BranchLayout& layout() const { return decoder.context_.layout.branches[branch]; }
  void in(const Tensor& x_norm, const Tensor& /*weight*/, const Tensor& hidden) {
    decoder.multiply(x_norm, layout().in, hidden);
  }
  void attention(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out) {
    decoder.context_.cache.attend(branch, 0, q, k, v, out);
  }
  void out(const Tensor& inner, const Tensor& /*weight*/) {
    const DecoderContext& c = decoder.context_;
    decoder.sum(x.dim(0), branch_wire(c.codec, layout()),
                [&](const Tensor& partial) { decoder.multiply(inner, layout().out, partial); });
    add(c.exec, x, decoder.residual_->rows(0, x.dim(0)), x);
  }
  void experts(const Tensor& x_norm, const Tensor& w_in, const Tensor& w_out) {
    Communicator& tp = decoder.context_.tp;
    const Shard local = shard_of(x.dim(0), tp.size(), tp.rank());
    const Tensor rows = x.rows(local.begin, local.count);
    decoder.experts_->run(layout(), x_norm.rows(local.begin, local.count), w_in, w_out, rows);
    all_gather(tp, rows, x);
  }
};

std::span<const Sampled> BatchDecoder::run(const BatchRows& rows) {
  const auto count = int64_t(rows.tokens.size());
  const DecoderContext& c = context_;
  c.cache.set_rows(rows.sequences, rows.positions, rows.pages, rows.chunks);
  return progress_.during([&]() -> std::span<const Sampled> {
    look_up(rows);
    for (size_t i = 0; i < c.layout.branches.size(); ++i) {
      const BranchLayout& b = c.layout.branches[i];
      const Tensor x = x_->rows(0, count);
      forward_branch(
          c.view(), b, x,
          branch_memory(b, x_norm_->rows(0, count), inverse_rms_, hidden_, inner_, count),
          Steps{*this, i, x});
    }
    if (rows.chosen.empty()) return {};
    last_logits_ = logits(rows.chosen);
    return sample(last_logits_, rows.options);
  });
}

std::vector<float> BatchDecoder::read_logits(size_t chosen) const {
  std::vector<float> logits(size_t(context_.config.vocab));
  const int64_t vocab = context_.config.vocab;
  copy(context_.exec, last_logits_.rows(int64_t(chosen), 1),
       Tensor(logits.data(), DType::f32, {1, vocab}));
  return logits;
}

void BatchDecoder::look_up(const BatchRows& rows) {
  const DecoderContext& c = context_;
  const auto count = int64_t(rows.tokens.size());
  const Tensor tokens = tokens_.upload(rows.tokens);
  sum(count, c.codec.embeddings, [&](const Tensor& partial) {
    embedding_forward(c.exec, tokens, c.weights.matrix(c.layout.embedding), c.layout.vocab_begin,
                      partial);
  });
  cast(c.exec, residual_->rows(0, count), x_->rows(0, count));
}

/// Logits of the chosen rows, [chosen, vocab], bitwise equal on every rank.
Tensor BatchDecoder::logits(std::span<const int32_t> chosen) {
  const DecoderContext& c = context_;
  const auto count = int64_t(chosen.size());
  const Tensor last = last_->rows(0, count), last_norm = last_norm_->rows(0, count);
  embedding_forward(c.exec, chosen_.upload(chosen), x_, 0, last);  // gathers rows
  rms_norm_forward(c.exec, last, c.weights.vector(c.layout.final_norm, c.config.hidden),
                   c.config.norm_eps, last_norm, inverse_rms_);
  const Tensor local = reshaped(local_logits_, count, c.layout.vocab);
  multiply(last_norm, c.layout.head, local);
  const int world = c.tp.size();
  if (world == 1) return local;
  const int64_t room = count * logit_columns(c);
  const Tensor all = reshaped(gathered_, world, room);
  all_gather(c.tp, reshaped(local_logits_, 1, room), all);
  for (int rank = 0; rank < world; ++rank) {
    const Shard columns = shard_of(c.config.vocab, world, rank);
    for (int64_t row = 0; row < count; ++row) {
      cast(c.exec, all.rows(rank, 1).narrow(1, row * columns.count, columns.count),
           logits_->rows(row, 1).narrow(1, columns.begin, columns.count));
    }
  }
  return logits_->rows(0, count);
}

std::span<const Sampled> BatchDecoder::sample(const Tensor& logits,
                                              std::span<const SampleOptions> options) {
  const DecoderContext& c = context_;
  const auto count = int64_t(options.size());
  const Tensor on_device = options_->rows(0, count), sampled = sampled_->rows(0, count);
  const auto* const bytes = reinterpret_cast<const uint8_t*>(options.data());
  upload_options_.run(c.exec, Tensor::of(bytes, {count, int64_t(sizeof(SampleOptions))}),
                      on_device);
  sample_rows(c.exec, logits, on_device, sample_scratch_->rows(0, count), sampled);
  const std::span<Sampled> result = std::span(host_sampled_).first(size_t(count));
  copy(c.exec, sampled, Tensor(result.data(), DType::u8, {count, int64_t(sizeof(Sampled))}));
  return result;
}

}  // namespace tandem
