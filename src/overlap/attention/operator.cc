#include "overlap/attention/operator.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <functional>
#include <type_traits>
#include <vector>

#include "comm/agreement.h"
#include "comm/call_card.h"
#include "comm/workspace.h"
#include "core/operands.h"
#include "overlap/attention/operands.h"
#include "overlap/contract/check.h"
#include "tandem/error.h"
#include "tune/measure.h"
#include "tune/tuner.h"

namespace tandem {

using schedule::ContextSplit;

namespace {

constexpr std::string_view kName = "context_attention";

constexpr std::array<const ContextFormRow*, 4> kForms{&kGatherForm, &kRingForm, &kHeadsForm,
                                                      &kQueriesForm};

std::string describe(const ContextShape& s) {
  return fmt::format("batch {} seq {} keys {} heads {} kv_heads {} head_dim {} {} {} {}{}{}",
                     s.batch, s.seq, s.keys, s.heads, s.kv_heads, s.head_dim, name_of(s.dtype),
                     s.causal ? "causal" : "cross",
                     s.split == ContextSplit::balanced ? "balanced" : "contiguous",
                     s.softcap > 0 ? fmt::format(" softcap {}", s.softcap) : "",
                     s.wire.is_none() ? "" : " keys as " + s.wire.describe());
}

void require(bool valid, std::string_view what, int64_t value, std::string_view expected) {
  if (valid) return;
  throw InvalidArgument(fmt::format("{}: {} {}: expected {}", kName, what, value, expected));
}

ContextShape with_keys(ContextShape s) {
  if (s.keys == 0) s.keys = s.seq;
  return s;
}

void check_shape(const ContextShape& s) {
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
  s.wire.check();
  if (const std::string expected = find_wire_conflict(s.wire, s.head_dim); !expected.empty()) {
    throw InvalidArgument(
        fmt::format("{}: wire {}: expected {}", kName, s.wire.describe(), expected));
  }
}

void check_window(const ContextShape& s, int64_t window) {
  require(window >= 0, "window", window, "0 or more");
  require(s.causal || window == 0, "window", window, "0 without causal");
}

/// Forms to run with `options`.
std::vector<const ContextFormRow*> allowed(const ContextGrid& grid, const ContextOptions& options,
                                           std::string& refusals) {
  std::vector<const ContextFormRow*> forms;
  std::string names;
  for (const ContextFormRow* row : kForms) {
    names += (names.empty() ? "" : ", ") + std::string(row->name);
    if (!options.form.empty() && options.form != row->name) continue;
    const bool fits = options.strategy == Strategy::automatic || options.strategy == row->strategy;
    if (options.form.empty() && !fits) continue;
    const std::string refusal = row->refusal(grid);
    if (refusal.empty()) {
      forms.push_back(row);
      continue;
    }
    refusals += fmt::format("{}{}: {}", refusals.empty() ? "" : "; ", row->name, refusal);
  }
  if (forms.empty() && !refusals.empty()) {
    throw InvalidArgument(fmt::format("{}: form {}", kName, refusals));
  }
  if (forms.empty()) {
    throw InvalidArgument(
        fmt::format("{}: form '{}': expected one of {}", kName, options.form, names));
  }
  return forms;
}

/// The local attention of one rank.
class LocalForm final : public ContextForm {
 public:
  LocalForm(const ContextShape& s, const RopeTable& rope)
      : attention_(Exec{}, {s.batch, s.seq, s.heads, s.kv_heads, s.head_dim, s.softcap}, rope) {}
  void forward(const ContextForward& c) override {
    attention_.forward(Exec{}, c.q, c.k, c.v, c.out, c.log_sums, c.mask);
  }
  void backward(const ContextBackward& c) override {
    attention_.backward(Exec{}, c.q, c.k, c.v, c.out, c.log_sums, c.dout, c.dq, c.dk, c.dv, c.mask);
  }

 private:
  Attention attention_;
};
constinit const ContextFormRow kLocalForm{
    "local",
    Strategy::serial,
    nullptr,
    nullptr,
    [](ContextPass, const ContextGrid&, int64_t) { return int64_t{0}; },
    [](Communicator&, const ContextGrid& grid, const RopeTable* rope)
        -> std::unique_ptr<ContextForm> { return std::make_unique<LocalForm>(grid.shape, *rope); }};

}  // namespace

std::span<const ContextFormRow* const> context_forms() {
  return kForms;
}

size_t context_attention_bytes(const ContextShape& shape, int ranks,
                               const ContextOptions& options) {
  const ContextGrid grid{with_keys(shape), ranks, 0};
  check_shape(grid.shape);
  std::string refusals;
  std::vector<size_t> bytes;
  for (const ContextFormRow* row : allowed(grid, options, refusals)) {
    bytes.push_back(row->bytes(grid));
  }
  std::ranges::sort(bytes, std::greater<>());
  return bytes[0] + (options.backward && bytes.size() > 1 ? bytes[1] : 0);
}

template <typename Call>
ContextOperator::Pass<Call> ContextOperator::choose_form(
    std::string_view name, std::span<const std::shared_ptr<ContextForm>> forms,
    std::span<const ContextFormRow* const> rows, const ContextOptions& options,
    const std::string& refusals, const Call& sample) {
  std::vector<CandidateOf<const Call&>> candidates;
  std::vector<std::string> names;
  std::vector<NamedForm> named;
  for (size_t i = 0; i < forms.size(); ++i) {
    const auto run = [this, form = forms[i]](const Call& call) {
      progress_.during([&] {
        if constexpr (std::is_same_v<Call, ContextForward>) {
          form->forward(call);
        } else {
          form->backward(call);
        }
      });
    };
    candidates.push_back({.name = rows[i]->name, .form = rows[i]->strategy, .run = run});
    names.emplace_back(rows[i]->name);
    named.push_back({names.back(), rows[i]->strategy});
  }
  Choice choice;
  if (candidates.size() > 1 && comm_.size() > 1) {
    const std::string shape = fmt::format("{} window {}", describe(grid_.shape), options.window);
    choice = tune(comm_, name, shape, names,
                  [&](size_t i) { return timed(comm_, [&] { candidates[i].run(sample); })(); });
  }
  Pass<Call> pass{
      candidates[choice],
      list_receipt({.op = std::string(name),
                    .shape = describe(grid_.shape),
                    .dtype = std::string(name_of(grid_.shape.dtype)),
                    .group = comm_.size(),
                    .asked = options.form.empty() ? options.strategy : rows[0]->strategy}),
      rows[choice]};
  record_choice(*pass.receipt, named, choice.us, choice, refusals);
  require_as_asked(*pass.receipt, options.strict);
  return pass;
}

ContextOperator::ContextOperator(Communicator& comm, const ContextShape& shape,
                                 const RopeTable* rope, const ContextOptions& options)
    : comm_(comm),
      grid_{with_keys(shape), comm.size(), comm.rank()},
      window_(options.window),
      progress_(comm, kName.data()) {
  if (comm.on_gpu()) {
    throw Unsupported(fmt::format("{}: GPU ranks: expected CPU ranks", kName));
  }
  keep(comm);
  if (comm.size() == 1) grid_.shape.wire = {};  // which sends nothing
  std::string refusals;
  std::vector<const ContextFormRow*> rows;
  const std::string refusal = failure_of([&] {
    check_shape(grid_.shape);
    check_window(grid_.shape, options.window);
    rows = allowed(grid_, options, refusals);
  });
  comm.require_same(
      kName, refusal.empty() ? fmt::format("{}{} {} form '{}'{} window {}{}", describe(grid_.shape),
                                           rope ? " rotated" : "", name_of(options.strategy),
                                           options.form, options.backward ? " backward" : "",
                                           options.window, strictness(options.strict))
                             : refusal);
  if (!refusal.empty()) throw InvalidArgument(refusal);
  card_ =
      fmt::format("{} {}, operator {}", kName, describe(grid_.shape), ++comm.workspace().operators);
  if (comm.size() == 1 && grid_.shape.causal && rope) rows = {&kLocalForm};
  std::vector<std::shared_ptr<ContextForm>> forms;
  for (const ContextFormRow* row : rows) forms.push_back(row->make(comm, grid_, rope));
  const bool measures = rows.size() > 1 && comm.size() > 1;
  const ContextOperands sample(measures ? grid_ : ContextGrid{{.keys = 0}, 1, 0}, options.window);
  forward_ = choose_form<ContextForward>("context_attention", forms, rows, options, refusals,
                                         sample.forward());
  if (!options.backward) return;
  backward_ = choose_form<ContextBackward>("context_attention backward", forms, rows, options,
                                           refusals, sample.backward());
}
ContextOperator::~ContextOperator() = default;

int64_t ContextOperator::sent_bytes(ContextPass pass) const {
  const ContextFormRow* const row = pass == ContextPass::forward ? forward_.row : backward_.row;
  return row ? row->sent_bytes(pass, grid_, window_) : 0;
}

void ContextOperator::check_rows_of(const char* name, const Tensor& tensor, int64_t rows,
                                    int64_t columns) const {
  const DType dtype = grid_.shape.dtype;
  check_rows(kName, name, tensor, rows, columns, dtype, dtype);
}

void ContextOperator::check_mask(const AttentionMask& mask) const {
  const ContextShape& s = grid_.shape;
  check_window(s, mask.window);
  if (mask.document_starts.dims() == 0) return;
  if (!s.causal) {
    throw InvalidArgument(fmt::format("{}: document_starts: expected none without causal", kName));
  }
  check_rows(kName, "document_starts", mask.document_starts, 1, s.batch * s.seq, DType::i32,
             DType::i32);
}

void ContextOperator::check(const ContextForward& call) const {
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

void ContextOperator::check(const ContextBackward& call) const {
  check(ContextForward{call.q, call.k, call.v, call.out, call.log_sums, call.mask});
  const int64_t rows = call.q.dim(0), keys = call.k.dim(0);
  check_rows_of("dout", call.dout, rows, grid_.q_columns());
  check_rows_of("dq", call.dq, rows, grid_.q_columns());
  check_rows_of("dk", call.dk, keys, grid_.kv_columns());
  check_rows_of("dv", call.dv, keys, grid_.kv_columns());
  // Gradients may be columns of one matrix.
  for (const auto& [name, gradient] :
       {std::pair{"dq", &call.dq}, {"dk", &call.dk}, {"dv", &call.dv}}) {
    require_apart(kName, {{name, gradient}},
                  {{"q", &call.q},
                   {"k", &call.k},
                   {"v", &call.v},
                   {"out", &call.out},
                   {"log_sums", &call.log_sums},
                   {"dout", &call.dout}});
  }
  const Operand dq{"dq", &call.dq}, dk{"dk", &call.dk}, dv{"dv", &call.dv};
  for (const auto& [a, b] : {std::pair{dq, dk}, {dq, dv}, {dk, dv}}) {
    if (byte_rows(*a.tensor).overlaps(byte_rows(*b.tensor))) refuse_overlap(kName, a, b);
  }
}

void ContextOperator::forward(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out,
                              const Tensor& log_sums, const AttentionMask& mask) {
  const ContextForward call{q, k, v, out, log_sums, mask};
  check(call);
  ++forward_.receipt->calls;
  CallOnCard card(comm_, card_);
  card.writes("out", out);
  card.writes("log_sums", log_sums);
  card.reads("q", q);
  card.reads("k", k);
  card.reads("v", v);
  progress_.during([&] { card.require_apart(kName); });
  forward_.chosen.run(call);
}

void ContextOperator::backward(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out,
                               const Tensor& log_sums, const Tensor& dout, const Tensor& dq,
                               const Tensor& dk, const Tensor& dv, const AttentionMask& mask) {
  const ContextBackward call{q, k, v, out, log_sums, dout, dq, dk, dv, mask};
  if (!backward_.receipt) {
    throw InvalidArgument(
        fmt::format("{}: backward pass: expected an operator made with backward", kName));
  }
  check(call);
  ++backward_.receipt->calls;
  CallOnCard card(comm_, card_);
  card.writes("dq", dq);
  card.writes("dk", dk);
  card.writes("dv", dv);
  card.reads("q", q);
  card.reads("k", k);
  card.reads("v", v);
  card.reads("out", out);
  card.reads("log_sums", log_sums);
  card.reads("dout", dout);
  progress_.during([&] { card.require_apart(kName); });
  backward_.chosen.run(call);
}

}  // namespace tandem
