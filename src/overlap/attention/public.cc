#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <string>
#include <utility>

#include "overlap/attention/operator.h"
#include "tandem/attention.h"
#include "tandem/error.h"

namespace tandem {

namespace {

ContextChunks to_chunks(const schedule::ContextRows& rows) {
  return {{rows.head.begin, rows.head.count}, {rows.tail.begin, rows.tail.count}};
}

ContextShape to_internal(const ContextAttention::Shape& s) {
  return {.batch = s.batch,
          .seq = s.seq,
          .keys = s.keys,
          .heads = s.heads,
          .kv_heads = s.kv_heads,
          .head_dim = s.head_dim,
          .dtype = s.dtype,
          .causal = s.causal,
          .split =
              s.contiguous ? schedule::ContextSplit::contiguous : schedule::ContextSplit::balanced};
}

/// Collective. The table of the shape, if that is valid; the operator refuses others.
std::optional<RopeTable> agreed_rope(Communicator& comm, const ContextAttention::Shape& s) {
  if (comm.on_gpu()) return {};
  const std::string theta = fmt::format("rope_theta {}", s.rope_theta);
  comm.require_same("context_attention", theta);
  if (!(s.rope_theta >= 0 && std::isfinite(s.rope_theta))) {
    throw InvalidArgument(
        fmt::format("context_attention: {}: expected 0 or a positive number", theta));
  }
  if (s.rope_theta == 0) return {};
  comm.require_same("context_attention",
                    fmt::format("seq {} keys {} head_dim {}", s.seq, s.keys, s.head_dim));
  const int64_t positions = std::max(s.seq, s.keys);
  const bool is_valid = positions >= 1 && positions <= int64_t{1} << 30 && s.head_dim >= 2;
  if (!is_valid || s.head_dim % 2 != 0) return {};
  return std::optional<RopeTable>(std::in_place, Exec{}, positions, s.head_dim, s.rope_theta);
}

}  // namespace

ContextChunks context_chunks(int64_t positions, int ranks, int rank, bool contiguous) {
  if (positions < 0 || ranks < 1 || rank < 0 || rank >= ranks) {
    throw InvalidArgument(
        fmt::format("context_chunks: positions {} rank {} of {}: expected positions of at least 0 "
                    "and a rank in [0, ranks)",
                    positions, rank, ranks));
  }
  return to_chunks(schedule::context_rows(
      positions, ranks, rank,
      contiguous ? schedule::ContextSplit::contiguous : schedule::ContextSplit::balanced));
}

/// The operator with what it borrows.
class ContextOnRanks {
 public:
  ContextOnRanks(Communicator& comm, const ContextAttention::Shape& shape,
                 const ContextAttentionOptions& options)
      : window_(shape.window),
        rope_(agreed_rope(comm, shape)),
        operator_(
            comm, to_internal(shape), rope_ ? &*rope_ : nullptr,
            {options.strategy, options.form, options.backward, shape.window, options.strict}) {}

  ContextOperator& get() { return operator_; }

  AttentionMask mask(const Tensor* document_starts) const {
    if (!document_starts) return {window_};
    const ContextShape& s = operator_.grid().shape;
    if (document_starts->dims() == 0) {
      throw InvalidArgument(
          fmt::format("context_attention: document_starts is {}: expected i32 [1, {}]",
                      document_starts->describe(), s.batch * s.seq));
    }
    const AttentionMask mask(window_, *document_starts);
    operator_.check_mask(mask);
    const auto* const starts = document_starts->as<const int32_t>();
    for (int64_t i = 0; i < s.batch * s.seq; ++i) {
      const int64_t position = i % s.seq, start = starts[i];
      const int64_t before = position == 0 ? 0 : starts[i - 1];
      if (start == position || (position > 0 && start == before)) continue;
      throw InvalidArgument(fmt::format(
          "context_attention: document_starts: {} at position {} of sequence {}: expected the "
          "position itself{}",
          start, position, i / s.seq,
          position == 0 ? "" : fmt::format(" or {}, as before it", before)));
    }
    return mask;
  }

 private:
  int64_t window_;
  std::optional<RopeTable> rope_;
  ContextOperator operator_;
};

namespace {
ContextOnRanks& used(const std::unique_ptr<ContextOnRanks>& impl) {
  if (impl) return *impl;
  throw InvalidArgument("context_attention: called on an operator that was moved from");
}
}  // namespace

ContextAttention::ContextAttention(Communicator& comm, const Shape& shape,
                                   const ContextAttentionOptions& options)
    : impl_(std::make_unique<ContextOnRanks>(comm, shape, options)) {}
ContextAttention::~ContextAttention() = default;
ContextAttention::ContextAttention(ContextAttention&&) noexcept = default;
ContextAttention& ContextAttention::operator=(ContextAttention&&) noexcept = default;

ContextChunks ContextAttention::query_chunks() const {
  return to_chunks(used(impl_).get().query_rows());
}
ContextChunks ContextAttention::key_chunks() const {
  return to_chunks(used(impl_).get().key_rows());
}

void ContextAttention::forward(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out,
                               const Tensor& log_sums, const Tensor* document_starts) {
  ContextOnRanks& on_ranks = used(impl_);
  on_ranks.get().forward(q, k, v, out, log_sums, on_ranks.mask(document_starts));
}

void ContextAttention::backward(const Tensor& q, const Tensor& k, const Tensor& v,
                                const Tensor& out, const Tensor& log_sums, const Tensor& dout,
                                const Tensor& dq, const Tensor& dk, const Tensor& dv,
                                const Tensor* document_starts) {
  ContextOnRanks& on_ranks = used(impl_);
  on_ranks.get().backward(q, k, v, out, log_sums, dout, dq, dk, dv, on_ranks.mask(document_starts));
}

std::string_view ContextAttention::forward_form() const {
  return used(impl_).get().forward_form();
}
std::string_view ContextAttention::backward_form() const {
  return used(impl_).get().backward_form();
}
int64_t ContextAttention::forward_bytes() const {
  return used(impl_).get().sent_bytes(ContextPass::forward);
}
int64_t ContextAttention::backward_bytes() const {
  return used(impl_).get().sent_bytes(ContextPass::backward);
}

}  // namespace tandem
