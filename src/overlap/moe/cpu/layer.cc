#include "overlap/moe/cpu/layer.h"

#include <fmt/format.h>

#include <algorithm>

#include "codec/whole.h"
#include "comm/agreement.h"
#include "core/operands.h"
#include "observe/recorder.h"
#include "overlap/contract/check.h"
#include "tune/candidate.h"

namespace tandem {

using namespace schedule;

namespace {

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
  if (options.quantization && !options.dispatch.is_none()) {
    throw InvalidArgument(
        fmt::format("moe: dispatch codec '{}' with e4m3 experts: expected none, as rows are sent "
                    "as e4m3",
                    options.dispatch.describe()));
  }
  // Throws for unsupported chunk counts.
  chunk_counts("moe", {options.strategy, options.chunks}, shape.tokens);
  comm.require_same(
      "moe",
      fmt::format("{} {} chunks {} as {}, back as {}{}{}{}", coords.describe(),
                  name_of(options.strategy), options.chunks, options.dispatch.describe(),
                  options.combine.describe(), options.allow_uncompressed ? " or uncompressed" : "",
                  saves(options.save) + quantizes(options) + activates(options),
                  strictness(options.strict)));
  return shape;
}

/// Ranks' coordinates with the bytes of a row as it is sent.
MoeRankCoords with_sent_rows(MoeRankCoords coords, const MoeOptions& options) {
  if (options.quantization) coords.row_bytes = size_t(packed_row_bytes(coords.shape.hidden));
  return coords;
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

const MoeActivation kSwiglu;

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
      save_(options.save),
      quantization_(options.quantization),
      activation_(options.activation ? *options.activation : kSwiglu),
      progress_(comm, "moe"),
      dispatch_(comm, with_sent_rows(coords_, options), options.dispatch),
      combine_(comm, coords_, options.combine) {
  const auto levels = size_t(moe_levels(coords_.grid, shape.top_k));
  for (int i = 0; i < kStages; ++i) {
    plans_[size_t(i)].assign(levels, moe_plans(options, Stage(i), coords_)[0]);
  }
  local_dx_first_.assign(levels, options.strategy == Strategy::overlapped);
  Tuned tuned;
  if (options.strategy == Strategy::automatic && comm.size() > 1)
    tuned = tune_stages(comm, options);
  list_choices(options, tuned);
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
    const MoeShape& s = coords_.shape;
    const int64_t slots = coords_.usual_rows(), f = coords_.ffn;
    if (save_ == MoeSave::recompute) {
      rows.sent_rows.of(s.dtype, s.tokens, s.hidden);
      return;
    }
    rows.gate_up.of(s.dtype, slots, 2 * f);
    if (save_ == MoeSave::rows) {
      rows.distinct.of(sent_dtype(), std::min(slots, coords_.world * s.tokens), sent_columns());
      return;
    }
    rows.inner.of(s.dtype, slots, f);
    rows.x.of(sent_dtype(), slots, sent_columns());
  });
}

void MoeLayerOnRanks::forward(const Tensor& x, const MoeRouting& routing, const Tensor& w_in,
                              const Tensor& w_out, const Tensor& out, MoeRows& rows,
                              const std::function<void()>& meanwhile) {
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
  together(call, check_operands,
           [&] { run_forward(x, routing, w_in, w_out, out, rows, meanwhile); });
}

void MoeLayerOnRanks::backward(const Tensor& dout, const Tensor& w_in, const Tensor& w_out,
                               const MoeRows& rows, const Tensor& dx, const Tensor& dweights,
                               const Tensor& dw_in, const Tensor& dw_out, WeightGradients gradients,
                               const std::function<void()>& meanwhile) {
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
    check("dw_in", dw_in, w_in.dim(0), s.hidden, s.dtype, DType::f32);
    check("dw_out", dw_out, w_out.dim(0), coords_.ffn, s.dtype, DType::f32);
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
    run_backward(dout, w_in, w_out, rows, {dx, dweights, dw_in, dw_out, gradients, &meanwhile});
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
  return rows_->saved_bytes();
}

namespace {

const MoeOptions& supported(const Communicator& comm, const MoeOptions& options) {
  if (comm.on_gpu() && options.quantization) {
    throw Unsupported("moe: e4m3 experts on GPUs: expected bf16 or f16");
  }
  if (comm.on_gpu() && options.activation) {
    throw Unsupported("moe: clamped experts or biases on GPUs: expected SwiGLU without biases");
  }
  return options;
}

}  // namespace

MoeLayer::MoeLayer(Communicator& comm, const MoeShape& shape, const MoeOptions& options)
    : impl_(comm.on_gpu() ? make_gpu_moe(comm, shape, supported(comm, options))
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
                       const Tensor& w_out, const Tensor& out, MoeBatch& batch,
                       const std::function<void()>& meanwhile) {
  const ScopedPhase phase(Phase::ep_wait);
  if (!batch.rows_) batch = MoeBatch();  // it was moved from
  impl_->count_forward();
  impl_->forward(x, routing, w_in, w_out, out, *batch.rows_, meanwhile);
}
void MoeLayer::backward(const Tensor& dout, const Tensor& w_in, const Tensor& w_out,
                        const MoeBatch& batch, const Tensor& dx, const Tensor& dweights,
                        const Tensor& dw_in, const Tensor& dw_out, WeightGradients gradients,
                        const std::function<void()>& meanwhile) {
  const ScopedPhase phase(Phase::ep_wait);
  const MoeRows none;
  impl_->count_backward();
  impl_->backward(dout, w_in, w_out, batch.rows_ ? *batch.rows_ : none, dx, dweights, dw_in, dw_out,
                  gradients, meanwhile);
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
