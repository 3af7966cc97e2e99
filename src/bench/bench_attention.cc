#include "bench/bench_attention.h"

#include <fmt/format.h>
#include <xxhash.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "bench/bare_transfer.h"
#include "core/random_buffer.h"
#include "overlap/attention/exchange.h"
#include "overlap/attention/operands.h"
#include "overlap/attention/operator.h"
#include "overlap/attention/reference.h"
#include "tandem/error.h"
#include "tune/measure.h"

namespace tandem {
namespace {

using schedule::ContextRows;

constexpr double kRopeTheta = 10000;

/// Hash of the results.
uint64_t digest(const ContextOperands& o, bool backward) {
  uint64_t sum = 0;
  for (const Tensor* t : {&o.out, &o.log_sums, &o.dq, &o.dk, &o.dv}) {
    if (t == &o.dq && !backward) break;
    sum = XXH3_64bits_withSeed(t->data(), t->bytes(), sum);
  }
  return sum;
}

/// Slices of the blocks of a rank's queries, on keys that are here.
class BlocksAlone {
 public:
  explicit BlocksAlone(const AttentionBench& q, const ContextGrid& grid)
      : q_(q), grid_(grid), kernel_(grid.block_shape()) {
    const auto rows = [&](DType dtype, int64_t chunk, int64_t columns) {
      const auto one = [&] {
        memory_.push_back(random_buffer(dtype, grid.shape.batch * chunk * columns, memory_.size()));
        return memory_.back().view(dtype, {grid.shape.batch * chunk, columns});
      };
      return cpu::ChunkRows{one(), one()};
    };
    const DType dtype = grid.shape.dtype, f32 = DType::f32;
    const int64_t queries = grid.max_query_chunk(), keys = grid.max_key_chunk();
    for (auto* t : {&query_, &dout_}) *t = rows(dtype, queries, grid.q_columns());
    for (auto* t : {&key_, &value_}) *t = rows(dtype, keys, grid.kv_columns());
    for (auto* t : {&out_, &dq_}) *t = rows(f32, queries, grid.q_columns());
    for (auto* t : {&log_sums_, &delta_}) *t = rows(f32, queries, grid.shape.heads);
    for (auto* t : {&dk_, &dv_}) *t = rows(f32, keys, grid.kv_columns());
  }
  void run() {
    for (int owner = 0; owner < grid_.world; ++owner) {
      const auto block = grid_.block(grid_.rank, owner, q_.window);
      if (block.empty()) continue;
      const cpu::AttentionBlock all =
          grid_.attention(block, AttentionMask(q_.window), query_, key_, value_);
      each_slice(grid_, all, owner == grid_.rank, [&](const cpu::AttentionBlock& slice) {
        kernel_.forward(slice, out_, log_sums_);
        if (q_.backward) kernel_.backward(slice, {dout_, log_sums_, delta_, dq_, dk_, dv_});
      });
    }
  }

 private:
  AttentionBench q_;
  ContextGrid grid_;
  cpu::BlockAttention kernel_;
  std::vector<Memory> memory_;
  cpu::ChunkRows query_, key_, value_, out_, log_sums_, dout_, delta_, dq_, dk_, dv_;
};

/// A few rows, from the first to the last.
std::vector<int64_t> sampled_rows(int64_t count) {
  std::vector<int64_t> rows;
  for (const int64_t i : {int64_t{0}, count / 3, count - 1}) {
    if (i >= 0 && i < count && (rows.empty() || rows.back() != i)) rows.push_back(i);
  }
  return rows;
}

class AttentionBenchRun {
 public:
  AttentionBenchRun(Communicator& comm, const AttentionBench& request)
      : comm_(comm),
        q_(request),
        rope_(Exec{}, std::max<int64_t>(1, request.shape.seq), request.shape.head_dim, kRopeTheta) {
    for (const ContextFormRow* row : context_forms()) add_form(*row);
    chosen_ = std::make_unique<ContextOperator>(
        comm, q_.shape, rope(), ContextOptions{.backward = q_.backward, .window = q_.window});
    result_.chosen_forward = chosen_->forward_form();
    if (q_.backward) result_.chosen_backward = chosen_->backward_form();
    operands_ = std::make_unique<ContextOperands>(chosen_->grid(), q_.window);
  }

  AttentionBenchResult run() {
    check();
    measure_all();
    return result_;
  }

 private:
  struct Form {
    const ContextFormRow& row;
    std::unique_ptr<ContextOperator> attention;
  };

  const RopeTable* rope() const { return q_.shape.causal ? &rope_ : nullptr; }

  void add_form(const ContextFormRow& row) {
    ContextGrid grid{q_.shape, comm_.size(), comm_.rank()};
    const std::string refusal = row.refusal(grid);
    if (!refusal.empty()) {
      result_.refusals +=
          fmt::format("{}{}: {}", result_.refusals.empty() ? "" : "; ", row.name, refusal);
      return;
    }
    forms_.push_back({row, std::make_unique<ContextOperator>(
                               comm_, q_.shape, rope(),
                               ContextOptions{.form = row.name, .backward = q_.backward})});
  }

  void run(ContextOperator& attention) const {
    const ContextOperands& o = *operands_;
    attention.forward(o.q, o.k, o.v, o.out, o.log_sums, o.mask);
    if (!q_.backward) return;
    attention.backward(o.q, o.k, o.v, o.out, o.log_sums, o.dout, o.dq, o.dk, o.dv, o.mask);
  }

  /// Counts bytes and compares bits of every form, and sampled rows of the last with the
  /// reference.
  void check() {
    uint64_t first = 0;
    bool same = true, same_bytes = true;
    for (const Form& form : forms_) {
      for (int again = 0; again < 2; ++again) {
        const uint64_t before = comm_.bytes_sent();
        run(*form.attention);
        const auto sent = int64_t(comm_.bytes_sent() - before);
        AttentionForm& of = result_.forms[form.row.name];
        of.strategy = form.row.strategy;
        of.bytes = int64_t(max_over_ranks(comm_, double(sent)));
        of.bytes_formula = int64_t(max_over_ranks(comm_, double(formula(form))));
        const uint64_t bits = digest(*operands_, q_.backward);
        if (&form == &forms_.front() && again == 0) first = bits;
        same = same && bits == first;
        same_bytes = same_bytes && sent == formula(form);
      }
    }
    result_.same_bits = max_over_ranks(comm_, double(!same)) == 0;
    result_.same_bytes = max_over_ranks(comm_, double(!same_bytes)) == 0;
    compare_with_reference();
    result_.max_rel = max_over_ranks(comm_, difference_) / max_over_ranks(comm_, size_);
    result_.of_bound = max_over_ranks(comm_, result_.of_bound);
  }

  int64_t formula(const Form& form) const {
    const ContextGrid& grid = chosen_->grid();
    const auto& sent_bytes = form.row.sent_bytes;
    return sent_bytes(ContextPass::forward, grid, q_.window) +
           (q_.backward ? sent_bytes(ContextPass::backward, grid, q_.window) : 0);
  }

  void compare_with_reference() {
    const ContextGrid& grid = chosen_->grid();
    const ContextShape& s = grid.shape;
    ContextReference reference(comm_, grid, rope(), operands_->forward());
    if (q_.backward) reference.gather_gradients(operands_->backward());
    relative_ = 2 * reference.relative_bound(std::max(s.seq * s.heads / s.kv_heads, s.keys));
    const ContextRows rows = grid.queries(grid.rank), keys = grid.keys(grid.rank);
    const int64_t b = s.batch - 1;
    for (const int64_t i : sampled_rows(rows.count())) {
      for (const int64_t h : sampled_rows(s.heads)) {
        const auto query = reference.query(b, h, rows.position(i));
        compare(operands_->out, b * rows.count() + i, h, query.out, query.magnitude);
        if (!q_.backward) continue;
        const auto dq = reference.dq(b, h, rows.position(i));
        compare(operands_->dq, b * rows.count() + i, h, dq.value, dq.magnitude);
      }
    }
    if (!q_.backward) return;
    for (const int64_t i : sampled_rows(keys.count())) {
      for (const int64_t h : sampled_rows(s.kv_heads)) {
        const auto key = reference.key(b, h, keys.position(i));
        compare(operands_->dk, b * keys.count() + i, h, key.dk.value, key.dk.magnitude);
        compare(operands_->dv, b * keys.count() + i, h, key.dv.value, key.dv.magnitude);
      }
    }
  }

  void compare(const Tensor& tensor, int64_t row, int64_t head, const std::vector<double>& expected,
               double magnitude) {
    const bool is_f32 = tensor.dtype() == DType::f32;
    for (size_t d = 0; d < expected.size(); ++d) {
      const double value = element(tensor, row, head * q_.shape.head_dim + int64_t(d));
      const double off = std::isnan(value) ? INFINITY : std::abs(value - expected[d]);
      const double rounding = (is_f32 ? 0x1p-23 : 0x1p-8) * std::abs(expected[d]);
      difference_ = std::max(difference_, off);
      size_ = std::max(size_, std::abs(expected[d]));
      result_.of_bound =
          std::max(result_.of_bound, off / (relative_ * magnitude + rounding + 1e-12));
    }
  }

  void measure_all() {
    const Form& min_form = *std::ranges::min_element(
        forms_, {}, [&](const Form& form) { return result_.forms[form.row.name].bytes; });
    BlocksAlone alone(q_, chosen_->grid());
    BareTransfer transfer(comm_, formula(min_form));
    std::vector<std::function<void()>> variants{[&] { alone.run(); }, [&] { transfer.run(); },
                                                [&] { run(*chosen_); }};
    for (const Form& form : forms_) {
      variants.emplace_back([this, attention = form.attention.get()] { run(*attention); });
    }
    const auto seconds =
        measure(comm_, variants, {.min_rounds = q_.repeats, .max_rounds = q_.repeats});
    result_.compute = times_of(seconds[0]);
    result_.wire = times_of(seconds[1]);
    result_.chosen = times_of(seconds[2]);
    for (size_t i = 0; i < forms_.size(); ++i) {
      result_.forms[forms_[i].row.name].times = times_of(seconds[3 + i]);
    }
    for (const Receipt& each : receipts()) {  // a form that was named asks for its own strategy
      if (each.asked == Strategy::automatic) result_.receipts.push_back(each);
    }
  }

  Communicator& comm_;
  AttentionBench q_;
  RopeTable rope_;
  std::vector<Form> forms_;
  std::unique_ptr<ContextOperator> chosen_;
  std::unique_ptr<ContextOperands> operands_;
  AttentionBenchResult result_;
  double relative_ = 0, difference_ = 0, size_ = 1e-30;
};

}  // namespace

const std::string& AttentionBenchResult::fastest() const {
  return std::ranges::min_element(forms, {},
                                  [](const auto& form) { return form.second.times.median_us; })
      ->first;
}

const BenchTimes& AttentionBenchResult::fastest(Strategy strategy) const {
  return std::ranges::min_element(forms, {},
                                  [&](const auto& form) {
                                    return std::pair(form.second.strategy != strategy,
                                                     form.second.times.median_us);
                                  })
      ->second.times;
}

double AttentionBenchResult::limit_us() const {
  return std::max(compute.median_us, wire.median_us);
}

double AttentionBenchResult::hidden(const BenchTimes& times) const {
  const double smaller = std::min(compute.median_us, wire.median_us);
  return (compute.median_us + wire.median_us - times.median_us) / smaller;
}

AttentionBenchResult run_attention_bench(Communicator& comm, const AttentionBench& request) {
  if (comm.size() == 1) {
    throw InvalidArgument("bench attention: 1 rank, which sends nothing: expected 2 or more");
  }
  AttentionBench complete = request;
  if (complete.shape.keys == 0) complete.shape.keys = complete.shape.seq;
  clear_receipts();
  return AttentionBenchRun(comm, complete).run();
}

}  // namespace tandem
