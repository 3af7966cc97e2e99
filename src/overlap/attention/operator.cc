#include "overlap/attention/operator.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>

#include "comm/call_card.h"
#include "comm/workspace.h"
#include "core/operands.h"
#include "overlap/contract/check.h"
#include "tandem/error.h"

namespace tandem {

using schedule::ContextSplit;

namespace {

constexpr std::string_view kName = "context_attention";

constexpr std::array<const ContextFormRow*, 4> kForms{&kGatherForm, &kRingForm, &kHeadsForm,
                                                      &kQueriesForm};

std::string describe(const ContextShape& s) {
  return fmt::format("batch {} seq {} keys {} heads {} kv_heads {} head_dim {} {} {} {}", s.batch,
                     s.seq, s.keys, s.heads, s.kv_heads, s.head_dim, name_of(s.dtype),
                     s.causal ? "causal" : "cross",
                     s.split == ContextSplit::balanced ? "balanced" : "contiguous");
}

void require(bool valid, std::string_view what, int64_t value, std::string_view expected) {
  if (valid) return;
  throw InvalidArgument(fmt::format("{}: {} {}: expected {}", kName, what, value, expected));
}

ContextShape checked(ContextShape s) {
  if (s.keys == 0) s.keys = s.seq;
  constexpr int64_t kMax = int64_t{1} << 30;
  require(s.batch >= 1 && s.batch <= kMax, "batch", s.batch, "1 to 2^30");
  require(s.seq >= 1 && s.seq <= kMax, "seq", s.seq, "1 to 2^30");
  require(s.keys >= 1 && s.keys <= kMax, "keys", s.keys, "1 to 2^30");
  require(s.kv_heads >= 1, "kv_heads", s.kv_heads, "at least 1");
  require(s.heads >= 1 && s.heads % s.kv_heads == 0, "heads", s.heads,
          fmt::format("a multiple of kv_heads {}", s.kv_heads));
  require(s.head_dim >= 2 && s.head_dim % 2 == 0, "head_dim", s.head_dim,
          "an even number from 2 on");
  require(!s.causal || s.keys == s.seq, "keys", s.keys,
          fmt::format("seq {} of causal attention", s.seq));
  if (s.dtype != DType::f32 && s.dtype != DType::bf16) {
    throw InvalidArgument(
        fmt::format("{}: dtype {}: expected f32 or bf16", kName, name_of(s.dtype)));
  }
  return s;
}

/// Forms to run with `options`.
std::vector<const ContextFormRow*> allowed(const ContextGrid& grid, const ContextOptions& options) {
  std::vector<const ContextFormRow*> forms;
  std::string names;
  for (const ContextFormRow* row : kForms) {
    names += (names.empty() ? "" : ", ") + std::string(row->name);
    if (!options.form.empty() && options.form != row->name) continue;
    const std::string refusal = row->refusal(grid);
    if (refusal.empty()) {
      forms.push_back(row);
    } else if (!options.form.empty()) {
      throw InvalidArgument(fmt::format("{}: form {}: {}", kName, row->name, refusal));
    }
  }
  if (forms.empty()) {
    throw InvalidArgument(
        fmt::format("{}: form '{}': expected one of {}", kName, options.form, names));
  }
  return forms;
}

}  // namespace

std::span<const ContextFormRow* const> context_forms() {
  return kForms;
}

ContextAttention::ContextAttention(Communicator& comm, const ContextShape& shape,
                                   const RopeTable* rope, const ContextOptions& options)
    : comm_(comm),
      grid_{checked(shape), comm.size(), comm.rank()},
      progress_(comm, kName.data()) {
  if (comm.on_gpu()) {
    throw Unsupported(fmt::format("{}: GPU ranks: expected CPU ranks", kName));
  }
  keep(comm);
  const auto rows = allowed(grid_, options);
  comm.require_same(kName, fmt::format("{}{} form '{}'", describe(grid_.shape),
                                       rope ? " rotated" : "", options.form));
  card_ = fmt::format("{} {}, operator {}", kName, describe(grid_.shape),
                      ++comm.workspace().operators);
  if (comm.size() == 1 && grid_.shape.causal && rope) {
    const ContextShape& s = grid_.shape;
    local_ = std::make_unique<Attention>(
        Exec{}, AttentionShape{s.batch, s.seq, s.heads, s.kv_heads, s.head_dim}, *rope);
    return;
  }
  for (const ContextFormRow* row : rows) {
    ContextForm* const form = forms_.emplace_back(row->make(comm, grid_, rope)).get();
    forward_.push_back({.name = row->name,
                        .form = row->strategy,
                        .run = [form](const ContextForward& call) { form->forward(call); }});
    backward_.push_back({.name = row->name,
                         .form = row->strategy,
                         .run = [form](const ContextBackward& call) { form->backward(call); }});
  }
}
ContextAttention::~ContextAttention() = default;

void ContextAttention::check_rows_of(const char* name, const Tensor& tensor, int64_t rows,
                                     int64_t columns) const {
  const DType dtype = grid_.shape.dtype;
  check_rows(kName, name, tensor, rows, columns, dtype, dtype);
}

void ContextAttention::check_mask(const AttentionMask& mask) const {
  const ContextShape& s = grid_.shape;
  require(mask.window >= 0, "window", mask.window, "0 or more");
  require(s.causal || mask.window == 0, "window", mask.window, "0 without causal");
  if (mask.document_starts.dims() == 0) return;
  if (!s.causal) {
    throw InvalidArgument(fmt::format("{}: document_starts: expected none without causal", kName));
  }
  check_rows(kName, "document_starts", mask.document_starts, 1, s.batch * s.seq, DType::i32,
             DType::i32);
}

void ContextAttention::check(const ContextForward& call) const {
  const ContextShape& s = grid_.shape;
  const int64_t rows = s.batch * query_rows().count(), keys = s.batch * key_rows().count();
  check_rows_of("q", call.q, rows, grid_.q_columns());
  check_rows_of("k", call.k, keys, grid_.kv_columns());
  check_rows_of("v", call.v, keys, grid_.kv_columns());
  check_rows_of("out", call.out, rows, grid_.q_columns());
  check_rows(kName, "log_sums", call.log_sums, s.batch * s.heads, query_rows().count(), DType::f32,
             DType::f32);
  check_mask(call.mask);
  require_apart(kName, {{"out", &call.out}, {"log_sums", &call.log_sums}},
                {{"q", &call.q}, {"k", &call.k}, {"v", &call.v}});
}

void ContextAttention::check(const ContextBackward& call) const {
  check(ContextForward{call.q, call.k, call.v, call.out, call.log_sums, call.mask});
  const int64_t rows = call.q.dim(0), keys = call.k.dim(0);
  check_rows_of("dout", call.dout, rows, grid_.q_columns());
  check_rows_of("dq", call.dq, rows, grid_.q_columns());
  check_rows_of("dk", call.dk, keys, grid_.kv_columns());
  check_rows_of("dv", call.dv, keys, grid_.kv_columns());
  require_apart(kName, {{"dq", &call.dq}, {"dk", &call.dk}, {"dv", &call.dv}},
                {{"q", &call.q},
                 {"k", &call.k},
                 {"v", &call.v},
                 {"out", &call.out},
                 {"log_sums", &call.log_sums},
                 {"dout", &call.dout}});
}

void ContextAttention::forward(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out,
                               const Tensor& log_sums, const AttentionMask& mask) {
  const ContextForward call{q, k, v, out, log_sums, mask};
  check(call);
  if (local_) return local_->forward(Exec{}, q, k, v, out, log_sums, mask);
  CallOnCard card(comm_, card_);
  card.writes("out", out);
  card.writes("log_sums", log_sums);
  card.reads("q", q);
  card.reads("k", k);
  card.reads("v", v);
  progress_.during([&] {
    card.require_apart(kName);
    forward_[chosen_forward_].run(call);
  });
}

void ContextAttention::backward(const Tensor& q, const Tensor& k, const Tensor& v,
                                const Tensor& out, const Tensor& log_sums, const Tensor& dout,
                                const Tensor& dq, const Tensor& dk, const Tensor& dv,
                                const AttentionMask& mask) {
  const ContextBackward call{q, k, v, out, log_sums, dout, dq, dk, dv, mask};
  check(call);
  if (local_) return local_->backward(Exec{}, q, k, v, out, log_sums, dout, dq, dk, dv, mask);
  CallOnCard card(comm_, card_);
  card.writes("dq", dq);
  card.writes("dk", dk);
  card.writes("dv", dv);
  card.reads("q", q);
  card.reads("k", k);
  card.reads("v", v);
  card.reads("out", out);
  card.reads("dout", dout);
  progress_.during([&] {
    card.require_apart(kName);
    backward_[chosen_backward_].run(call);
  });
}

}  // namespace tandem
