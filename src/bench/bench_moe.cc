#include "bench/bench_moe.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <numeric>
#include <optional>

#include "comm/workspace.h"
#include "gemm/gemm.h"
#include "kernels/swiglu.h"
#include "overlap/contract/operator_row.h"
#include "overlap/moe/cpu/layer.h"
#include "overlap/moe/load.h"
#include "tandem/collectives.h"
#include "tandem/error.h"
#include "tandem/random.h"

namespace tandem {
namespace {

constexpr std::array<MoeModel, 5> kModels = {{{"mixtral-8x7b", 8, 2, 4096, 14336},
                                              {"qwen2-moe-2.7b", 64, 4, 2048, 1408},
                                              {"phi3.5-moe", 16, 2, 4096, 6400},
                                              {"qwen3-30b", 128, 8, 2048, 768},
                                              {"deepseek-v3", 256, 8, 7168, 2048}}};

/// Name of a layer with unpublished sizes.
constexpr const char* kCustomSizes = "custom";

MoeShape shape_of(const BenchRequest& q, int ranks) {
  return {.tokens = shard_of(q.m, ranks, 0).count,
          .hidden = q.k,
          .ffn = q.n,
          .experts = q.moe.experts,
          .top_k = q.moe.top_k,
          .tp = q.moe.tp,
          .dtype = q.dtype};
}

/// With a codec, encodes dispatch and combine, and also allows uncompressed rows.
MoeOptions options_of(const BenchRequest& q, Strategy strategy) {
  return {.strategy = strategy,
          .chunks = strategy == Strategy::serial ? 0 : q.chunks,
          .dispatch = q.wire,
          .combine = q.wire,
          .allow_uncompressed = !q.wire.is_none(),
          .save = q.moe.save};
}

/// Call of the layer, or of one of its operators.
class MoeCase : public BenchCase {
 public:
  MoeCase(Communicator& comm, const BenchRequest& q)
      : comm_(comm),
        q_(q),
        coords_(comm, shape_of(q, comm.size())),
        local_(shard_of(q.m, comm.size(), comm.rank())),
        chosen_(chosen_experts(coords_.grid, q.moe.top_k, {q.moe.imbalance, 1}, local_.begin,
                               local_.count)),
        weights_(chosen_.size(), 1.0f / float(q.moe.top_k)),
        dweights_(chosen_.size()),
        x_(q.dtype, local_.count, q.k, 1 + uint64_t(comm.rank())),
        w_in_(q.dtype, coords_.experts.count * 2 * coords_.ffn, q.k, 100 + uint64_t(comm.rank())),
        w_out_(q.dtype, coords_.experts.count * q.k, coords_.ffn, 200 + uint64_t(comm.rank())),
        dout_(q.dtype, q.moe.backward ? local_.count : 0, q.k, 300 + uint64_t(comm.rank())),
        dw_in_(DType::f32, q.moe.backward ? w_in_.tensor.dim(0) : 0, q.k, 0),
        dw_out_(DType::f32, q.moe.backward ? w_out_.tensor.dim(0) : 0, coords_.ffn, 0),
        expected_dw_in_(DType::f32, dw_in_.tensor.dim(0), q.k, 0),
        expected_dw_out_(DType::f32, dw_out_.tensor.dim(0), coords_.ffn, 0),
        out_(q.dtype, local_.count, q.k, 0),
        dx_(q.dtype, q.moe.backward ? local_.count : 0, q.k, 0),
        whole_(q.dtype, q.m, q.k, 0),
        sums_(DType::f32, q.m, q.k, 0),
        expected_(DType::f32, local_.count, q.k, 0),
        expected_out_memory_(size_t(q.moe.backward ? local_.count * q.k : 0) * sizeof(float)),
        expected_out_(
            expected_out_memory_.view(DType::f32, {q.moe.backward ? local_.count : 0, q.k})),
        layer_(comm, shape_of(q, comm.size()), options_of(q, Strategy::serial)) {
    scale(w_in_.tensor, q.k);
    scale(w_out_.tensor, q.n);
    // Determines the rows on this rank. GEMMs alone and the reference read sorted rows.
    MoeLayerOnRanks(comm, coords_.shape, {.strategy = Strategy::serial})
        .run_forward(x_.tensor, routing(), w_in_.tensor, w_out_.tensor, out_.tensor, rows_);
    list_slots();
  }

  std::string baseline() const override {
    return "rows to their experts' ranks, or to all, and the products, one after the other";
  }
  /// Grouped GEMMs of this rank's slots and the SwiGLU between them, of dispatch and combine,
  /// without moving rows.
  void gemm_alone() override {
    const int64_t f = coords_.ffn, slots = rows_.slots();
    const Tensor x = rows_.x.view(q_.dtype, slots, q_.k);
    const Tensor h = serial_hidden_.of(q_.dtype, slots, std::max(2 * f, q_.k));
    for (int e = 0; e < int(coords_.experts.count); ++e) {
      const schedule::Range range = rows_.slots_of(e);
      if (range.count > 0) multiply_alone(e, range, x, h);
    }
  }
  void reference() override;
  void reset() override {
    clear(dw_in_.tensor);
    clear(dw_out_.tensor);
  }
  std::vector<BoundCandidate> forms() override {
    std::vector<BoundCandidate> all;
    const auto add = [&](const OverlapOptions& plan) {
      const bool encoded = !plan.wire.is_none();
      all.push_back({moe_candidate_name(plan), plan.strategy,
                     [this, plan, encoded] { counted([&] { run(layer_, plan); }, encoded); },
                     encoded, plan.chunks});
    };
    if (find_moe(q_.op)->is_layer() && q_.chunks == 0) {
      add({Strategy::serial, 1});
      if (!q_.wire.is_none()) add({Strategy::serial, 1, q_.wire});
      add_chosen(all);
      return all;
    }
    const auto stage = combines_only() ? MoeLayerOnRanks::combine : MoeLayerOnRanks::dispatch;
    for (const OverlapOptions& plan :
         moe_plans(options_of(q_, Strategy::automatic), stage, coords_)) {
      add(plan);
    }
    if (q_.moe.backward) add_backward_forms(all);
    return all;
  }
  std::vector<Receipt> receipts() const override {
    if (!chosen_layer_) return {};
    std::vector<Receipt> passes = chosen_layer_->receipts();
    if (!q_.moe.backward) passes.resize(1);
    return passes;
  }
  int64_t counted_bytes() const override { return counted_bytes_; }
  int64_t saved_bytes() const override { return q_.moe.backward ? saved_bytes_ : 0; }
  double codec_error() override;
  Tensor result() const override {
    return dispatches() ? inner() : q_.moe.backward ? dx_.tensor : out_.tensor;
  }
  Tensor expected() const override {
    return dispatches() ? inner_.view(q_.dtype, {rows_.slots(), coords_.ffn}) : expected_.tensor;
  }
  std::vector<Tensor> more_results() const override {
    if (!q_.moe.backward) return {};
    return {out_.tensor, dw_in_.tensor, dw_out_.tensor};
  }
  std::vector<Tensor> more_expected() const override {
    if (!q_.moe.backward) return {};
    return {expected_out_, expected_dw_in_.tensor, expected_dw_out_.tensor};
  }
  int64_t wire_bytes() const override {
    int64_t rows = 0;
    for (int to = 0; to < comm_.size(); ++to) {
      if (to == comm_.rank()) continue;
      if (!combines_only()) rows += int64_t(rows_.sent(to).size());
      if (!dispatches()) rows += rows_.arrived(to);
    }
    return rows * int64_t(coords_.row_bytes) * (q_.moe.backward ? 2 : 1);
  }

 private:
  bool dispatches() const { return !find_moe(q_.op)->combines; }
  bool combines_only() const { return !find_moe(q_.op)->dispatches; }
  Tensor inner() const { return rows_.inner.view(q_.dtype, rows_.slots(), coords_.ffn); }
  MoeRouting routing() {
    const int64_t k = q_.moe.top_k;
    return {Tensor::of(std::span(chosen_), {local_.count, k}),
            Tensor::of(std::span(weights_), {local_.count, k})};
  }

  static void clear(const Tensor& values) {
    std::fill_n(values.as<float>(), values.elements(), 0.0f);
  }

  /// Scales a weight so that activations keep their magnitude.
  static void scale(const Tensor& weight, int64_t inputs) {
    const float factor = 1 / std::sqrt(float(inputs));
    for (int64_t i = 0; i < weight.elements(); ++i) {
      if (weight.dtype() == DType::f32) {
        weight.as<float>()[i] *= factor;
      } else {
        BFloat16& value = weight.as<BFloat16>()[i];
        value = BFloat16::from_float(value.to_float() * factor);
      }
    }
  }

  /// Adds the tuner's choice for each stage.
  void add_chosen(std::vector<BoundCandidate>& all) {
    chosen_layer_.emplace(comm_, coords_.shape, options_of(q_, Strategy::automatic));
    const OverlapOptions& there = chosen_layer_->plan(MoeLayerOnRanks::dispatch, rows_.level);
    const OverlapOptions& back = chosen_layer_->plan(MoeLayerOnRanks::combine, rows_.level);
    const bool encoded = !there.wire.is_none() || !back.wire.is_none();
    all.push_back({"chosen", Strategy::overlapped,
                   [this, encoded] { counted([&] { run(*chosen_layer_); }, encoded); }, encoded,
                   there.chunks});
  }

  void run(MoeLayerOnRanks& layer, const OverlapOptions& plan) {
    run(layer, plan, {plan.strategy, plan.chunks}, false);
  }
  void run(MoeLayerOnRanks& layer, const OverlapOptions& forward, const OverlapOptions& backward,
           bool local_dx_first) {
    layer.set_plan(MoeLayerOnRanks::dispatch, forward);
    layer.set_plan(MoeLayerOnRanks::combine, forward);
    layer.set_plan(MoeLayerOnRanks::dispatch_backward, backward);
    layer.set_plan(MoeLayerOnRanks::combine_backward, backward);
    layer.set_local_dx_first(local_dx_first);
    run(layer);
  }
  /// Forward passes as of `serial`, so that what is saved is the backward pass's.
  void add_backward_forms(std::vector<BoundCandidate>& all) {
    for (const bool local_dx_first : {false, true}) {
      const OverlapOptions backward{Strategy::overlapped, q_.chunks};
      all.push_back({fmt::format("backward {}, {}", local_dx_first ? "as a whole" : "by halves",
                                 moe_candidate_name(backward)),
                     Strategy::overlapped,
                     [this, backward, local_dx_first] {
                       run(layer_, {Strategy::serial, 1}, backward, local_dx_first);
                     },
                     false, q_.chunks});
    }
  }
  void counted(const std::function<void()>& body, bool encoded) {
    const uint64_t before = comm_.workspace().bytes_sent;
    body();
    if (encoded) counted_bytes_ = int64_t(comm_.workspace().bytes_sent - before);
  }
  void run(MoeLayerOnRanks& layer) {
    if (combines_only() && ran_) return layer.run_combine(w_out_.tensor, rows_, out_.tensor);
    ran_ = true;
    MoeRows& batch = q_.moe.save == MoeSave::sorted ? rows_ : saved_;
    layer.run_forward(x_.tensor, routing(), w_in_.tensor, w_out_.tensor,
                      dispatches() ? Tensor() : out_.tensor, batch);
    saved_bytes_ = int64_t(batch.saved_bytes());
    if (!q_.moe.backward) return;
    const Tensor dweights = Tensor::of(std::span(dweights_), {local_.count, q_.moe.top_k});
    layer.run_backward(dout_.tensor, w_in_.tensor, w_out_.tensor, batch,
                       {dx_.tensor, dweights, dw_in_.tensor, dw_out_.tensor});
  }

  void multiply_alone(int e, schedule::Range range, const Tensor& x, const Tensor& scratch) {
    const int64_t f = coords_.ffn;
    const auto slice = [&](const Tensor& t) { return t.rows(range.begin, range.count); };
    const Tensor in = w_in_.tensor.rows(e * 2 * f, 2 * f), out = w_out_.tensor.rows(e * q_.k, q_.k);
    const Tensor h = slice(scratch).narrow(1, 0, 2 * f), y = slice(scratch).narrow(1, 0, q_.k);
    if (!combines_only()) {
      gemm(slice(x), in.transposed(), h);
      swiglu_forward(Exec{}, h.narrow(1, 0, f), h.narrow(1, f, f),
                     slice(inner_.view(q_.dtype, {rows_.slots(), f})));
    }
    if (!dispatches()) gemm(slice(inner()), out.transposed(), y);
    if (!q_.moe.backward) return;
    const Tensor gate_up = slice(rows_.gate_up.view(q_.dtype, rows_.slots(), 2 * f));
    const Tensor d_act = slice(d_act_.view(q_.dtype, {rows_.slots(), f})), dh = h;
    gemm(slice(x), out, d_act);
    swiglu_backward(Exec{}, gate_up.narrow(1, 0, f), gate_up.narrow(1, f, f), d_act,
                    dh.narrow(1, 0, f), dh.narrow(1, f, f));
    gemm(dh, in, slice(y_.view(DType::f32, {rows_.slots(), q_.k})));
    gemm(slice(x).transposed(), slice(inner()), dw_out_.tensor.rows(e * q_.k, q_.k),
         {.accumulate = true});
    gemm(dh.transposed(), slice(x), dw_in_.tensor.rows(e * 2 * f, 2 * f), {.accumulate = true});
  }

  // Unfused reference: all rows to all ranks, GEMMs per slot, sums over all ranks.
  void list_slots();
  void fill_slots(const Tensor& local, const Tensor& to);
  void sum_slots(const Tensor& y);
  void reference_backward();

  Communicator& comm_;
  BenchRequest q_;
  MoeRankCoords coords_;
  Shard local_;
  std::vector<int32_t> chosen_;
  std::vector<float> weights_, dweights_;
  BenchMatrix x_, w_in_, w_out_, dout_, dw_in_, dw_out_, expected_dw_in_, expected_dw_out_;
  BenchMatrix out_, dx_, whole_, sums_, expected_;
  Memory expected_out_memory_;
  Tensor expected_out_;  ///< forward result if there is a backward pass, as `expected_` then is the
                         ///< rows' gradient
  MoeLayerOnRanks layer_;
  std::optional<MoeLayerOnRanks> chosen_layer_;
  MoeRows rows_, saved_;
  int64_t saved_bytes_ = 0;
  GrowingTensor serial_hidden_;
  std::vector<int64_t> slot_rows_;  // global row of each slot
  Memory permuted_, gate_up_, inner_, d_act_, y_;
  bool ran_ = false;
  int64_t counted_bytes_ = 0;
};

/// Bound of the error: rows of x are at most 1 and a row's weights sum to 1. Gate and up are off by
/// a fraction of a row sum of w_in, which propagates through their product and w_out; the partial
/// sums of all ranks sum to at most tp times one result. Assumes other ranks' values of similar
/// magnitude.
double MoeCase::codec_error() {
  const double largest = largest_magnitude(expected());
  if (largest == 0) return 0;
  const double each = error_of_wire(q_.wire, q_.dtype);
  double of_inner = 0;
  if (!combines_only()) {
    const Tensor h = gate_up_.view(q_.dtype, {rows_.slots(), 2 * coords_.ffn});
    const double off = each * largest_row(w_in_.tensor), size = largest_magnitude(h);
    of_inner = off * (2.1 * size + 1.1 * off);  // the slope of SiLU is at most 1.1
  }
  if (dispatches()) return of_inner * 1.5 / largest;
  const double row = q_.moe.tp * largest_row(w_out_.tensor);
  const double product = row * (largest_magnitude(inner()) + of_inner);
  return (row * of_inner + each * product) * 1.5 / largest;
}

/// Fills slot_rows_ with the global row of each slot.
void MoeCase::list_slots() {
  const int64_t f = coords_.ffn, all = std::max<int64_t>(1, rows_.slots());
  slot_rows_.resize(size_t(rows_.slots()));
  const std::vector<int32_t> chosen =
      chosen_experts(coords_.grid, q_.moe.top_k, {q_.moe.imbalance, 1}, 0, q_.m);
  for (int source = 0; source < comm_.size(); ++source) {
    const Shard rows = shard_of(q_.m, comm_.size(), source);
    int64_t arrived = 0;
    for (int64_t row = rows.begin; row < rows.begin + rows.count; ++row) {
      const auto first = chosen.begin() + row * q_.moe.top_k;
      if (std::none_of(first, first + q_.moe.top_k, [&](int32_t e) {
            return e >= coords_.experts.begin && e < coords_.experts.end();
          })) {
        continue;
      }
      for (const MoeUse& use : rows_.uses(source, arrived)) slot_rows_[size_t(use.slot)] = row;
      ++arrived;
    }
  }
  const auto memory = [&](int64_t columns, DType dtype) {
    return Memory(size_t(all * columns) * size_of(dtype));
  };
  permuted_ = memory(q_.k, q_.dtype);
  gate_up_ = memory(2 * f, q_.dtype);
  inner_ = memory(f, q_.dtype);
  d_act_ = memory(f, q_.dtype);
  y_ = memory(q_.k, DType::f32);
}

void MoeCase::fill_slots(const Tensor& local, const Tensor& to) {
  all_gather(comm_, local, whole_.tensor);
  for (size_t slot = 0; slot < slot_rows_.size(); ++slot) {
    std::memcpy(to.as<std::byte>() + slot * coords_.row_bytes,
                whole_.tensor.as<std::byte>() + size_t(slot_rows_[slot]) * coords_.row_bytes,
                coords_.row_bytes);
  }
}

void MoeCase::sum_slots(const Tensor& y) {
  std::fill_n(sums_.tensor.as<float>(), sums_.tensor.elements(), 0.0f);
  for (size_t slot = 0; slot < slot_rows_.size(); ++slot) {
    float* to = sums_.tensor.as<float>() + slot_rows_[slot] * q_.k;
    const float* from = y.as<float>() + int64_t(slot) * q_.k;
    for (int64_t j = 0; j < q_.k; ++j) to[j] += from[j];
  }
  reduce_scatter(comm_, sums_.tensor, expected_.tensor);
}

void MoeCase::reference() {
  const int64_t f = coords_.ffn, all = rows_.slots();
  const float weight = 1.0f / float(q_.moe.top_k);
  const Tensor x = permuted_.view(q_.dtype, {all, q_.k}), y = y_.view(DType::f32, {all, q_.k});
  const Tensor h = gate_up_.view(q_.dtype, {all, 2 * f}), a = inner_.view(q_.dtype, {all, f});
  if (!combines_only()) fill_slots(x_.tensor, x);
  for (int e = 0; e < int(coords_.experts.count); ++e) {
    const schedule::Range range = rows_.slots_of(e);
    const auto slice = [&](const Tensor& t) { return t.rows(range.begin, range.count); };
    if (!combines_only()) {
      gemm(slice(x), w_in_.tensor.rows(e * 2 * f, 2 * f).transposed(), slice(h));
      swiglu_forward(Exec{}, slice(h).narrow(1, 0, f), slice(h).narrow(1, f, f), slice(a));
    }
    const Tensor from = combines_only() ? inner() : a;
    if (!dispatches()) gemm(slice(from), w_out_.tensor.rows(e * q_.k, q_.k).transposed(), slice(y));
  }
  if (dispatches()) return;
  for (int64_t i = 0; i < y.elements(); ++i) y.as<float>()[i] *= weight;
  sum_slots(y);
  if (!q_.moe.backward) return;
  std::copy_n(expected_.tensor.as<float>(), expected_.tensor.elements(), expected_out_.as<float>());
  reference_backward();
}

/// Overwrites the result with the gradient of the rows.
void MoeCase::reference_backward() {
  const int64_t f = coords_.ffn, all = rows_.slots();
  const Tensor x = rows_.x.view(q_.dtype, all, q_.k), dout = permuted_.view(q_.dtype, {all, q_.k});
  const Tensor h = gate_up_.view(q_.dtype, {all, 2 * f}), y = y_.view(DType::f32, {all, q_.k});
  const Tensor a = inner_.view(q_.dtype, {all, f}), da = d_act_.view(q_.dtype, {all, f});
  const std::vector<float> weights(size_t(all), 1.0f / float(q_.moe.top_k));
  std::vector<float> d_gate_weight(static_cast<size_t>(all));
  fill_slots(dout_.tensor, dout);
  clear(expected_dw_in_.tensor);
  clear(expected_dw_out_.tensor);
  for (int e = 0; e < int(coords_.experts.count); ++e) {
    const schedule::Range range = rows_.slots_of(e);
    const auto slice = [&](const Tensor& t) { return t.rows(range.begin, range.count); };
    const Tensor hidden = slice(h), in = w_in_.tensor.rows(e * 2 * f, 2 * f);
    gemm(slice(dout), w_out_.tensor.rows(e * q_.k, q_.k), slice(da));
    scale_by_weight(slice(a), std::span(weights).first(size_t(range.count)), slice(da), slice(a),
                    std::span(d_gate_weight).first(size_t(range.count)));
    swiglu_backward(Exec{}, hidden.narrow(1, 0, f), hidden.narrow(1, f, f), slice(da),
                    hidden.narrow(1, 0, f), hidden.narrow(1, f, f));
    gemm(hidden, in, slice(y));
    gemm(slice(dout).transposed(), slice(a), expected_dw_out_.tensor.rows(e * q_.k, q_.k),
         {.accumulate = true});
    gemm(hidden.transposed(), slice(x), expected_dw_in_.tensor.rows(e * 2 * f, 2 * f),
         {.accumulate = true});
  }
  sum_slots(y);
}

}  // namespace

std::span<const MoeModel> moe_models() {
  return kModels;
}

void complete_moe(BenchRequest& q, int ranks) {
  MoeBench& moe = q.moe;
  bool changed = false;
  for (const MoeModel& model : kModels) {
    if (model.name != moe.model) continue;
    if (moe.experts == 0) moe.experts = model.experts;
    if (moe.top_k == 0) moe.top_k = model.top_k;
    q.k = std::max<int64_t>(8, model.hidden / moe.scale / 8 * 8);
    q.n = std::max<int64_t>(8, model.ffn / moe.scale / 8 * 8);
    changed =
        moe.experts != model.experts || moe.top_k != model.top_k || moe.hidden > 0 || moe.ffn > 0;
  }
  if (moe.hidden > 0) q.k = moe.hidden;
  if (moe.ffn > 0) q.n = moe.ffn;
  // Times do not apply to the published layer.
  if (moe.model.empty() || changed) moe.model = kCustomSizes;
  if (moe.top_k > moe.experts) {
    throw InvalidArgument(
        fmt::format("bench: --top-k {}: expected at most the {} experts", moe.top_k, moe.experts));
  }
  if (ranks == 0) return;
  if (moe.ep == 0) moe.ep = std::max(1, ranks / moe.tp);
  if (moe.ep * moe.tp != ranks) {
    throw InvalidArgument(
        fmt::format("bench: {} with ep {} and tp {} on {} ranks: expected ep x tp", q.op, moe.ep,
                    moe.tp, ranks));
  }
  if (moe.experts % moe.ep != 0) {
    throw InvalidArgument(fmt::format("bench: --ep {}: expected a divisor of {}'s {} experts",
                                      moe.ep, moe.model, moe.experts));
  }
  if (moe.imbalance != 0 && !(moe.imbalance >= 1 && moe.imbalance <= moe.ep)) {
    throw InvalidArgument(
        fmt::format("bench: --imbalance {}: expected 1 to ep = {}, or 0 for Zipf's law",
                    moe.imbalance, moe.ep));
  }
  const BenchMoeOp* op = find_moe(q.op);
  if (moe.save != MoeSave::sorted && !moe.backward) {
    throw InvalidArgument("bench: --save without --backward: expected both");
  }
  if (moe.backward && !(op && op->is_layer())) {
    throw InvalidArgument(fmt::format("bench: --backward with {}: expected moe", q.op));
  }
}

std::unique_ptr<BenchCase> make_moe_case(Communicator& comm, const BenchRequest& request) {
  if (!is_moe(request.op)) return nullptr;
  BenchRequest complete = request;
  complete_moe(complete, comm.size());
  return std::make_unique<MoeCase>(comm, complete);
}

MoeImbalance measured_imbalance(const BenchRequest& q, int ranks) {
  const schedule::MoeGrid grid{q.moe.experts, ranks / q.moe.tp, q.moe.tp};
  std::vector<int64_t> experts(size_t(q.moe.experts)), loads(size_t(grid.ep));
  for (const int32_t e : chosen_experts(grid, q.moe.top_k, {q.moe.imbalance, 1}, 0, q.m)) {
    ++experts[size_t(e)];
    ++loads[size_t(grid.holder(e) / grid.tp)];
  }
  return {schedule::moe_imbalance(loads.data(), grid.ep),
          schedule::moe_imbalance(experts.data(), q.moe.experts)};
}

}  // namespace tandem
