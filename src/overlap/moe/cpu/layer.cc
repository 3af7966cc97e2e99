#include "overlap/moe/cpu/layer.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "codec/whole.h"
#include "comm/agreement.h"
#include "core/operands.h"
#include "core/random_buffer.h"
#include "gemm/gemm.h"
#include "kernels/swiglu.h"
#include "observe/recorder.h"
#include "overlap/contract/check.h"
#include "overlap/moe/load.h"
#include "tune/candidate.h"
#include "tune/measure.h"
#include "tune/tuner.h"

namespace tandem {

using namespace schedule;

namespace {

constexpr std::array<const char*, MoeLayerOnRanks::kStages> kStageNames = {
    "moe_dispatch_gemm", "moe_gemm_combine", "moe_dispatch_gemm backward",
    "moe_gemm_combine backward"};

void check_wire(const char* stage, const Wire& wire, DType dtype) {
  codec::require_encodable(wire, dtype);
  if (wire.codec <= Codec::lossless) return;
  throw InvalidArgument(fmt::format("moe: {} codec '{}': expected one with groups or lossless",
                                    stage, wire.describe()));
}

const MoeShape& agreed(Communicator& comm, const MoeShape& shape, const MoeOptions& options) {
  const MoeRankCoords coords(comm, shape);
  check_wire("dispatch", options.dispatch, shape.dtype);
  check_wire("combine", options.combine, shape.dtype);
  // Throws for unsupported chunk counts.
  chunk_counts("moe", {options.strategy, options.chunks}, shape.tokens);
  comm.require_same("moe", fmt::format("{} {} chunks {} as {}, back as {}{}", coords.describe(),
                                       name_of(options.strategy), options.chunks,
                                       options.dispatch.describe(), options.combine.describe(),
                                       options.allow_uncompressed ? " or uncompressed" : ""));
  return shape;
}

const Wire& wire_of(const MoeOptions& options, MoeLayerOnRanks::Stage stage) {
  static constexpr Wire kUncompressed;
  switch (stage) {
    case MoeLayerOnRanks::dispatch:
      return options.dispatch;
    case MoeLayerOnRanks::combine:
      return options.combine;
    case MoeLayerOnRanks::dispatch_backward:
    case MoeLayerOnRanks::combine_backward:
      break;
  }
  return kUncompressed;
}

int max_chunks(MoeLayerOnRanks::Stage stage) {
  const bool dispatches =
      stage == MoeLayerOnRanks::dispatch || stage == MoeLayerOnRanks::dispatch_backward;
  return dispatches ? kMaxMoeWaves : kMaxChunks;
}

}  // namespace

std::string moe_candidate_name(const OverlapOptions& plan) {
  return fmt::format("{}, {} chunk{}{}", name_of(plan.strategy), plan.chunks,
                     plan.chunks == 1 ? "" : "s",
                     plan.wire.is_none() ? "" : " as " + plan.wire.describe());
}

std::vector<OverlapOptions> moe_plans(const MoeOptions& options, MoeLayerOnRanks::Stage stage,
                                      const MoeRankCoords& coords) {
  const Wire& wire = wire_of(options, stage);
  std::vector<Wire> wires;
  if (wire.is_none() || options.allow_uncompressed) wires.emplace_back();
  if (!wire.is_none()) wires.push_back(wire);
  const int64_t cut =
      max_chunks(stage) == kMaxMoeWaves ? coords.shape.tokens : coords.shape.hidden / 2;
  std::vector<OverlapOptions> plans;
  for (const Wire& each : wires) {
    if (options.strategy != Strategy::overlapped) plans.push_back({Strategy::serial, 1, each});
    for (const int chunks : chunk_counts("moe", {options.strategy, options.chunks}, cut)) {
      plans.push_back({Strategy::overlapped, std::min(chunks, max_chunks(stage)), each});
    }
  }
  return plans;
}

MoeLayerOnRanks::MoeLayerOnRanks(Communicator& comm, const MoeShape& shape,
                                 const MoeOptions& options)
    : comm_(comm),
      coords_(comm, agreed(comm, shape, options)),
      progress_(comm, "moe"),
      dispatch_(comm, coords_, options.dispatch),
      combine_(comm, coords_, options.combine) {
  const auto levels = size_t(moe_levels(coords_.grid, shape.top_k));
  for (int i = 0; i < kStages; ++i) {
    plans_[size_t(i)].assign(levels, moe_plans(options, Stage(i), coords_)[0]);
  }
  if (options.strategy == Strategy::automatic && comm.size() > 1) tune_stages(comm, options);
}

void MoeLayerOnRanks::check(const char* name, const Tensor& tensor, int64_t rows, int64_t columns,
                            DType dtype, DType other) const {
  check_rows("moe", name, tensor, rows, columns, dtype, other);
}

void MoeLayerOnRanks::check_weights(const Tensor& w_in, const Tensor& w_out) const {
  const auto& [s, grid, rank, world, experts, ffn, row_bytes] = coords_;
  check("w_in", w_in, experts.count * 2 * ffn, s.hidden, s.dtype, s.dtype);
  check("w_out", w_out, experts.count * s.hidden, ffn, s.dtype, s.dtype);
}

void MoeLayerOnRanks::together(CallOnCard& card, const std::function<void()>& check,
                               const std::function<void()>& call) {
  try {
    check();
  } catch (const InvalidArgument& refused) {
    std::string_view fault = refused.what();
    if (fault.starts_with("moe: ")) fault.remove_prefix(5);
    try {
      progress_.during([&] {
        card.require_apart("moe");
        dispatch_.refuse(fault);
      });
    } catch (const Error&) {
      // The common error of all ranks, or that of a wait: this rank's own fault says more.
    }
    throw;
  }
  progress_.during([&] {
    card.require_apart("moe");
    call();
  });
}

void MoeLayerOnRanks::prepare(MoeRows& rows) {
  rows.filled = {};
  agree_on(comm_, "moe: memory of a batch", [&] {
    const int64_t slots = coords_.usual_rows(), f = coords_.ffn;
    rows.gate_up.of(coords_.shape.dtype, slots, 2 * f);
    rows.inner.of(coords_.shape.dtype, slots, f);
    rows.x.of(coords_.shape.dtype, slots, coords_.shape.hidden);
  });
}

void MoeLayerOnRanks::forward(const Tensor& x, const MoeRouting& routing, const Tensor& w_in,
                              const Tensor& w_out, const Tensor& out, MoeRows& rows) {
  const auto check_operands = [&] {
    const MoeShape& s = coords_.shape;
    const int64_t num_rows = x.dims() == 2 ? std::min(x.dim(0), s.tokens) : s.tokens;
    check("x", x, num_rows, s.hidden, s.dtype, s.dtype);
    check("out", out, num_rows, s.hidden, s.dtype, DType::f32);
    check("routing.experts", routing.experts, num_rows, s.top_k, DType::i32, DType::i32);
    check("routing.weights", routing.weights, num_rows, s.top_k, DType::f32, DType::f32);
    check_weights(w_in, w_out);
    require_moe_apart(x, routing, w_in, w_out, out);
  };
  rows.filled = {};
  CallOnCard call(comm_, "forward of a layer of experts");
  call.writes("out", out);
  call.reads("x", x);
  call.reads("routing.experts", routing.experts);
  call.reads("routing.weights", routing.weights);
  call.reads("w_in", w_in);
  call.reads("w_out", w_out);
  together(call, check_operands, [&] {
    run_dispatch(x, routing, w_in, rows);
    run_combine(w_out, rows, out);
  });
}

void MoeLayerOnRanks::run_dispatch(const Tensor& x, const MoeRouting& routing, const Tensor& w_in,
                                   MoeRows& rows) {
  const int64_t f = coords_.ffn;
  Tensor gate_up, inner, permuted;
  const auto permuted_rows = [&] {
    gate_up = rows.gate_up.of(coords_.shape.dtype, rows.slots(), 2 * f);
    inner = rows.inner.of(coords_.shape.dtype, rows.slots(), f);
    return permuted = rows.x.of(coords_.shape.dtype, rows.slots(), coords_.shape.hidden);
  };
  const auto product = [&](int expert, Range slots) {
    const Tensor h = gate_up.rows(slots.begin, slots.count);
    gemm(permuted.rows(slots.begin, slots.count), w_in.rows(expert * 2 * f, 2 * f).transposed(), h);
    swiglu_forward(Exec{}, h.narrow(1, 0, f), h.narrow(1, f, f),
                   inner.rows(slots.begin, slots.count));
  };
  dispatch_.forward(plans_[dispatch], x, routing, rows, permuted_rows, product);
}

void MoeLayerOnRanks::run_combine(const Tensor& w_out, const MoeRows& rows, const Tensor& out) {
  const MoeShape& s = coords_.shape;
  const Tensor inner = rows.inner.view(s.dtype, rows.slots(), coords_.ffn);
  const auto product = [&](int expert, Range slots, Range columns, const Tensor& y) {
    gemm(inner.rows(slots.begin, slots.count),
         w_out.rows(expert * s.hidden + columns.begin, columns.count).transposed(), y);
  };
  combine_.run(plan(combine, rows.level),
               {.rows = rows, .weighted = true, .product = product, .out = out});
}

void MoeLayerOnRanks::run_dispatch_backward(const Tensor& dout, const Tensor& w_out,
                                            const MoeRows& rows) {
  const MoeShape& s = coords_.shape;
  const int64_t f = coords_.ffn, slots = rows.slots();
  const Tensor permuted = dout_.of(s.dtype, slots, s.hidden);
  const Tensor gate_up = rows.gate_up.view(s.dtype, slots, 2 * f);
  const Tensor inner = rows.inner.view(s.dtype, slots, f);
  const Tensor d_act = d_act_.of(s.dtype, slots, f), scaled = weighted_inner_.of(s.dtype, slots, f);
  const Tensor dgate_up = dgate_up_.of(s.dtype, slots, 2 * f);
  d_gate_weight_.resize(size_t(slots));
  const auto product = [&](int expert, Range range) {
    const auto slice = [&](const Tensor& t) { return t.rows(range.begin, range.count); };
    gemm(slice(permuted), w_out.rows(expert * s.hidden, s.hidden), slice(d_act));
    scale_by_weight(slice(inner), rows.weights().subspan(size_t(range.begin), size_t(range.count)),
                    slice(d_act), slice(scaled),
                    std::span(d_gate_weight_).subspan(size_t(range.begin), size_t(range.count)));
    const Tensor h = slice(gate_up), dh = slice(dgate_up);
    swiglu_backward(Exec{}, h.narrow(1, 0, f), h.narrow(1, f, f), slice(d_act), dh.narrow(1, 0, f),
                    dh.narrow(1, f, f));
  };
  dispatch_.backward(plan(dispatch_backward, rows.level), dout, rows, permuted, product);
}

void MoeLayerOnRanks::run_combine_backward(const Tensor& w_in, const MoeRows& rows,
                                           const Tensor& dx, const Tensor& dweights,
                                           const std::function<void()>& meanwhile) {
  const int64_t f = coords_.ffn;
  const Tensor dgate_up = dgate_up_.view(coords_.shape.dtype, rows.slots(), 2 * f);
  const auto product = [&](int expert, Range slots, Range columns, const Tensor& y) {
    gemm(dgate_up.rows(slots.begin, slots.count),
         w_in.rows(expert * 2 * f, 2 * f).narrow(1, columns.begin, columns.count), y);
  };
  combine_.run(plan(combine_backward, rows.level), {.rows = rows,
                                                    .weighted = false,
                                                    .product = product,
                                                    .out = dx,
                                                    .slot_values = d_gate_weight_,
                                                    .row_values = dweights,
                                                    .meanwhile = meanwhile});
}

/// dW += dy^T x, expert by expert. Last, as other ranks do not wait for them.
void MoeLayerOnRanks::weight_gradients(const MoeRows& rows, const Tensor& dw_in,
                                       const Tensor& dw_out) {
  const MoeShape& s = coords_.shape;
  const int64_t f = coords_.ffn, all = rows.slots();
  const Tensor x = rows.x.view(s.dtype, all, s.hidden), dout = dout_.view(s.dtype, all, s.hidden);
  const Tensor scaled = weighted_inner_.view(s.dtype, all, f);
  const Tensor dgate_up = dgate_up_.view(s.dtype, all, 2 * f);
  for (int expert = 0; expert < int(coords_.experts.count); ++expert) {
    const Range slots = rows.slots_of(expert);
    if (slots.count == 0) continue;
    const auto slice = [&](const Tensor& t) { return t.rows(slots.begin, slots.count); };
    gemm(slice(dout).transposed(), slice(scaled), dw_out.rows(expert * s.hidden, s.hidden),
         {.accumulate = true});
    gemm(slice(dgate_up).transposed(), slice(x), dw_in.rows(expert * 2 * f, 2 * f),
         {.accumulate = true});
  }
}

void MoeLayerOnRanks::backward(const Tensor& dout, const Tensor& w_in, const Tensor& w_out,
                               const MoeRows& rows, const Tensor& dx, const Tensor& dweights,
                               const Tensor& dw_in, const Tensor& dw_out) {
  const auto check_operands = [&] {
    const MoeShape& s = coords_.shape;
    if (const std::string fault = dispatch_.fault_of(rows); !fault.empty()) {
      throw InvalidArgument("moe: " + fault);
    }
    const int64_t num_rows = rows.local_rows();
    check("dout", dout, num_rows, s.hidden, s.dtype, s.dtype);
    check("dx", dx, num_rows, s.hidden, s.dtype, DType::f32);
    check("dweights", dweights, num_rows, s.top_k, DType::f32, DType::f32);
    check_weights(w_in, w_out);
    check("dw_in", dw_in, w_in.dim(0), s.hidden, DType::f32, DType::f32);
    check("dw_out", dw_out, w_out.dim(0), coords_.ffn, DType::f32, DType::f32);
    require_apart("moe",
                  {{"dx", &dx}, {"dweights", &dweights}, {"dw_in", &dw_in}, {"dw_out", &dw_out}},
                  {{"dout", &dout}, {"w_in", &w_in}, {"w_out", &w_out}});
  };
  CallOnCard call(comm_, "backward of a layer of experts");
  for (const auto& [name, tensor] : {Operand{"dx", &dx}, Operand{"dweights", &dweights},
                                     Operand{"dw_in", &dw_in}, Operand{"dw_out", &dw_out}}) {
    call.writes(name, *tensor);
  }
  call.reads("dout", dout);
  call.reads("w_in", w_in);
  call.reads("w_out", w_out);
  together(call, check_operands, [&] {
    run_dispatch_backward(dout, w_out, rows);
    run_combine_backward(w_in, rows, dx, dweights, [&] { weight_gradients(rows, dw_in, dw_out); });
  });
}

/// Measures on rows with each level's imbalance: the routing of a real call is not known yet.
void MoeLayerOnRanks::tune_stages(Communicator& comm, const MoeOptions& options) {
  const MoeShape& s = coords_.shape;
  const int64_t num_rows = s.tokens, local = coords_.experts.count;
  const auto matrix = [](const Memory& buffer, DType dtype, int64_t rows, int64_t columns) {
    return buffer.view(dtype, {rows, columns});
  };
  const Memory x = random_buffer(s.dtype, num_rows * s.hidden, 1),
               out = random_buffer(s.dtype, num_rows * s.hidden, 2);
  const Memory in = random_buffer(s.dtype, local * 2 * coords_.ffn * s.hidden, 3);
  const Memory back = random_buffer(s.dtype, local * s.hidden * coords_.ffn, 4);
  std::vector<int32_t> experts;
  std::vector<float> weights(size_t(num_rows * s.top_k), 1.0f / float(s.top_k)),
      dweights(weights.size());
  const Tensor rows_in = matrix(x, s.dtype, num_rows, s.hidden),
               rows_out = matrix(out, s.dtype, num_rows, s.hidden);
  const Tensor w_in = matrix(in, s.dtype, local * 2 * coords_.ffn, s.hidden);
  const Tensor w_out = matrix(back, s.dtype, local * s.hidden, coords_.ffn);
  const Tensor dw = Tensor::of(std::span(dweights), {num_rows, s.top_k});
  MoeRows rows;
  const auto routing = [&] {
    return MoeRouting{Tensor::of(std::span(experts), {num_rows, s.top_k}),
                      Tensor::of(std::span(weights), {num_rows, s.top_k})};
  };
  const std::array<std::function<void()>, kStages> run = {
      [&] { run_dispatch(rows_in, routing(), w_in, rows); },
      [&] { run_combine(w_out, rows, rows_out); },
      [&] { run_dispatch_backward(rows_in, w_out, rows); },
      [&] { run_combine_backward(w_in, rows, rows_out, dw, {}); }};
  std::array<std::vector<OverlapOptions>, kStages> chosen;
  const auto tune_stage = [&](Stage stage, const std::string& shape) {
    std::vector<OverlapOptions> plans = moe_plans(options, stage, coords_);
    if (!chosen[stage].empty()) {  // bits must not depend on the level
      std::erase_if(plans,
                    [&](const OverlapOptions& p) { return p.wire != chosen[stage][0].wire; });
    }
    std::vector<std::string> names;
    for (const OverlapOptions& plan : plans) names.push_back(moe_candidate_name(plan));
    const auto seconds = [&](size_t candidate) {
      set_plan(stage, plans[candidate]);
      return timed(comm, run[stage])();
    };
    const size_t best = tune(comm, kStageNames[stage], shape, names, seconds,
                             options.allow_uncompressed ? Bits::by_candidate : Bits::same);
    set_plan(stage, plans[best]);
    chosen[stage].push_back(plans[best]);
  };
  progress_.during([&] {
    for (int level = 0; level < levels(); ++level) {
      const double imbalance = moe_level_imbalance(coords_.grid, s.top_k, level);
      experts =
          chosen_experts(coords_.grid, s.top_k, {imbalance, 1}, num_rows * coords_.rank, num_rows);
      run[dispatch]();
      run[dispatch_backward]();
      const std::string shape = level == 0
                                    ? coords_.describe()
                                    : fmt::format("{} imbalance {}", coords_.describe(), imbalance);
      for (int i = 0; i < kStages; ++i) tune_stage(Stage(i), shape);
    }
    plans_ = std::move(chosen);
  });
}

MoeBatch::MoeBatch() : rows_(std::make_unique<MoeRows>()) {}
MoeBatch::~MoeBatch() = default;
MoeBatch::MoeBatch(MoeBatch&&) noexcept = default;
MoeBatch& MoeBatch::operator=(MoeBatch&&) noexcept = default;
std::span<const int64_t> MoeBatch::rows_of_experts() const {
  return rows_ ? rows_->rows_of_experts() : std::span<const int64_t>();
}
size_t MoeBatch::bytes() const {
  if (!rows_) return 0;
  return rows_->x.bytes() + rows_->gate_up.bytes() + rows_->inner.bytes() + rows_->bytes_on_gpu;
}

MoeLayer::MoeLayer(Communicator& comm, const MoeShape& shape, const MoeOptions& options)
    : impl_(comm.on_gpu() ? make_gpu_moe(comm, shape, options)
                          : std::make_unique<MoeLayerOnRanks>(comm, shape, options)) {
  impl_->keep(comm);
}
MoeLayer::~MoeLayer() = default;
MoeLayer::MoeLayer(MoeLayer&&) noexcept = default;
MoeLayer& MoeLayer::operator=(MoeLayer&&) noexcept = default;

void MoeLayer::prepare(MoeBatch& batch) {
  if (!batch.rows_) batch = MoeBatch();  // it was moved from
  impl_->prepare(*batch.rows_);
}
void MoeLayer::forward(const Tensor& x, const MoeRouting& routing, const Tensor& w_in,
                       const Tensor& w_out, const Tensor& out, MoeBatch& batch) {
  const ScopedPhase phase(Phase::ep_wait);
  if (!batch.rows_) batch = MoeBatch();  // it was moved from
  impl_->forward(x, routing, w_in, w_out, out, *batch.rows_);
}
void MoeLayer::backward(const Tensor& dout, const Tensor& w_in, const Tensor& w_out,
                        const MoeBatch& batch, const Tensor& dx, const Tensor& dweights,
                        const Tensor& dw_in, const Tensor& dw_out) {
  const ScopedPhase phase(Phase::ep_wait);
  const MoeRows none;
  impl_->backward(dout, w_in, w_out, batch.rows_ ? *batch.rows_ : none, dx, dweights, dw_in,
                  dw_out);
}
Strategy MoeLayer::dispatch_strategy() const {
  return impl_->dispatch_strategy();
}
Strategy MoeLayer::combine_strategy() const {
  return impl_->combine_strategy();
}
int64_t MoeLayer::dropped_routings() const {
  return impl_->dropped_routings();
}

}  // namespace tandem
