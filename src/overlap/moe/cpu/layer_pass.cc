// Passes of MoeLayerOnRanks: the launch of each step of schedule/moe_pass.h.
#include <cstring>
#include <stdexcept>

#include "core/cpu/parallel.h"
#include "gemm/gemm.h"
#include "gemm/quantized_gemm.h"
#include "kernels/elementwise.h"
#include "observe/recorder.h"
#include "overlap/moe/cpu/layer.h"

namespace tandem {

using namespace schedule;

namespace {

/// Copies the rows of x, which need not be contiguous.
void copy_rows(const Tensor& x, size_t row_bytes, GrowingTensor& to) {
  const Tensor copy = to.of(x.dtype(), x.dim(0), x.dim(1));
  const size_t stride = size_t(x.stride(0)) * size_of(x.dtype());
  for (int64_t row = 0; row < x.dim(0); ++row) {
    std::memcpy(copy.as<std::byte>() + size_t(row) * row_bytes,
                x.as<std::byte>() + size_t(row) * stride, row_bytes);
  }
}

}  // namespace

struct MoeLayerOnRanks::PassArgs {
  /// Kind of the rows that are dispatched: the layer's, again for a backward pass, or gradients.
  enum class Rows : uint8_t { forward, again, gradients };
  Rows kind = Rows::forward;
  const MoeRows& rows;
  Tensor dispatched = {};  ///< [local rows, hidden]
  Tensor w_in = {}, w_out = {};
  MoeRows* filled = nullptr;  ///< `rows`, in a forward pass
  const MoeRouting* routing = nullptr;
  Tensor out = {};  ///< of a forward pass
  Gradients gradients = {};
  const std::function<void()>* meanwhile = nullptr;  ///< called after send_rows
  bool is_combining = false;

  bool is_backward() const { return kind == Rows::gradients; }
  Stage dispatch_stage() const { return is_backward() ? dispatch_backward : dispatch; }
  Stage combine_stage() const { return is_backward() ? combine_backward : combine; }
};

MoePassForm MoeLayerOnRanks::form(Stage rows, Stage sums, int level) const {
  const OverlapOptions &there = plan(rows, level), &back = plan(sums, level);
  MoePassForm form{.row_chunks = there.chunks, .column_groups = back.chunks};
  if (coords_.world == 1) return form;
  if (there.strategy == Strategy::overlapped) form.rows = RowExchange::overlapped;
  if (back.strategy == Strategy::overlapped) form.sums = SumExchange::local_last;
  form.local_dx_first = rows == dispatch_backward && local_dx_first_[size_t(level)] &&
                        form.rows == RowExchange::overlapped &&
                        form.sums == SumExchange::local_last;
  return form;
}

// The level of all ranks' rows is known from `permute` on, which all forward passes have in the
// same place.
void MoeLayerOnRanks::run_pass(MoePass (*make)(const MoePassForm&), PassArgs& args) {
  const auto make_pass = [&] {
    return make(form(args.dispatch_stage(), args.combine_stage(), args.rows.level));
  };
  MoePass pass = make_pass();
  for (size_t i = 0; i < pass.size(); ++i) {
    launch(pass[i], args);
    if (args.filled && pass[i].step == MoeStep::permute) pass = make_pass();
  }
}

void MoeLayerOnRanks::launch(const PassStep& step, PassArgs& args) {
  const OverlapOptions& row_plan = plan(args.dispatch_stage(), args.rows.level);
  const OverlapOptions& sum_plan = plan(args.combine_stage(), args.rows.level);
  switch (step.step) {
    case MoeStep::notify:
      return args.filled ? dispatch_.notify(plans_[dispatch], *args.routing, *args.filled)
                         : dispatch_.notify_again(row_plan, args.rows);
    case MoeStep::send_rows:
      dispatch_.send_rows(row_plan, args.dispatched, args.rows);
      if (args.meanwhile && *args.meanwhile) (*args.meanwhile)();
      return;
    case MoeStep::permute:
      if (!args.filled) return dispatch_.await_ranks();
      dispatch_.permute(*args.filled);
      return make_room(*args.filled);
    case MoeStep::gather:
      return gather(step, args);
    case MoeStep::first:
    case MoeStep::d_act:
      return multiply_rows(step, args);
    case MoeStep::second:
    case MoeStep::dx:
      if (!args.is_combining) combine_.begin();
      args.is_combining = true;
      return combine_.multiply(sum_plan, combine_call(args), step.rows, step.chunk);
    case MoeStep::send_sums:
      return combine_.send_sums(sum_plan, combine_call(args), step.chunk);
    case MoeStep::sum_ranks:
      return combine_.sum_ranks(sum_plan, combine_call(args));
    case MoeStep::dw_in:
    case MoeStep::dw_out:
      return weight_gradient(step, args);
    case MoeStep::encode_rows:  // in send_rows
    case MoeStep::decode_rows:  // in gather
    case MoeStep::send_and_gather:
    case MoeStep::push_rows:
    case MoeStep::stage_sums:
    case MoeStep::push_sums:
    case MoeStep::swiglu:  // in first
    case MoeStep::gate:    // in d_act
      throw std::logic_error("moe: a pass of GPU ranks on CPU ranks");
  }
}

void MoeLayerOnRanks::gather(const PassStep& step, const PassArgs& args) {
  const OverlapOptions& row_plan = plan(args.dispatch_stage(), args.rows.level);
  MoeDispatchGemmCpu::Arrived to;
  to.sorted = args.is_backward() ? sorted_dout(args.rows) : sorted_x(args.rows);
  if (args.filled && save_ == MoeSave::rows) {
    to.distinct = args.rows.distinct.view(sent_dtype(), args.rows.received(), sent_columns());
  }
  if (step.rows != RowsFrom::remote) {
    dispatch_.gather_local(row_plan, args.dispatched, args.rows, to);
  }
  if (step.rows == RowsFrom::remote) {
    return dispatch_.gather_chunk(row_plan, step.chunk, args.rows, to);
  }
  for (int chunk = 0; step.rows == RowsFrom::all && chunk < row_plan.chunks; ++chunk) {
    dispatch_.gather_chunk(row_plan, chunk, args.rows, to);
  }
}

void MoeLayerOnRanks::multiply_rows(const PassStep& step, const PassArgs& args) {
  const ScopedLabel label("moe_dispatch_gemm", -1);
  Range groups{0, 1 + kMaxMoeWaves};
  if (step.rows == RowsFrom::local) groups = {0, 1};
  if (step.rows == RowsFrom::remote) {
    const int chunks = plan(args.dispatch_stage(), args.rows.level).chunks;
    const Range waves = moe_waves_of_chunk(chunks, step.chunk);
    groups = {1 + waves.begin, waves.count};
  }
  for (int expert = 0; expert < int(coords_.experts.count); ++expert) {
    const Range slots = args.rows.slots_of(expert, groups);
    if (slots.count == 0) continue;
    step.step == MoeStep::first ? multiply_first(expert, slots, args)
                                : multiply_d_act(expert, slots, args);
  }
}

void MoeLayerOnRanks::multiply_first(int expert, Range slots, const PassArgs& args) {
  const int64_t f = coords_.ffn;
  const auto slice = [&](const Tensor& t) { return t.rows(slots.begin, slots.count); };
  const Tensor h = slice(gate_up(args.rows));
  if (quantization_) {
    multiply_sent(slice(sorted_x(args.rows)),
                  rows_of(quantization_->weight(args.w_in, false), expert * 2 * f, 2 * f), h);
  } else {
    gemm(slice(sorted_x(args.rows)), args.w_in.rows(expert * 2 * f, 2 * f).transposed(), h);
  }
  activation_.forward(expert, h, slice(inner(args.rows)));
  if (quantization_) {
    quantize(slice(inner(args.rows)), rows_of(inner_codes_.view(args.rows.slots(), f), slots),
             quantization_->has_scales);
  }
}

void MoeLayerOnRanks::multiply_sent(const Tensor& sent, const QuantizedRows& weight,
                                    const Tensor& out) {
  const QuantizedRows rows = rows_.of(sent.dim(0), coords_.shape.hidden);
  unpack(sent, rows);
  gemm(Exec{}, rows, weight, out, false);
}

Tensor MoeLayerOnRanks::make_sent(const Tensor& x) {
  if (!quantization_) return x;
  const QuantizedRows rows = rows_.of(x.dim(0), x.dim(1));
  quantize(x, rows, quantization_->has_scales);
  const Tensor sent = sent_.of(sent_dtype(), x.dim(0), sent_columns());
  pack(rows, sent);
  return sent;
}

Tensor MoeLayerOnRanks::values_of(const Tensor& sorted, Range slots) {
  const Tensor rows = sorted.rows(slots.begin, slots.count);
  if (!quantization_) return rows;
  const MoeShape& s = coords_.shape;
  const QuantizedRows codes = rows_.of(slots.count, s.hidden);
  unpack(rows, codes);
  const Tensor exact = exact_values_.of(DType::f32, slots.count, s.hidden),
               values = values_.of(s.dtype, slots.count, s.hidden);
  dequantize_rows(codes.codes, codes.scales, exact);
  cast(Exec{}, exact, values);
  return values;
}

void MoeLayerOnRanks::multiply_d_act(int expert, Range range, const PassArgs& args) {
  const MoeShape& s = coords_.shape;
  const int64_t f = coords_.ffn, all = args.rows.slots();
  const auto slice = [&](const Tensor& t) { return t.rows(range.begin, range.count); };
  const Tensor d_act = slice(d_act_.view(s.dtype, all, f)), h = slice(gate_up(args.rows)),
               act = slice(inner(args.rows)), dh = slice(dgate_up_.view(s.dtype, all, 2 * f));
  if (quantization_) {
    multiply_sent(slice(sorted_dout(args.rows)),
                  rows_of(quantization_->weight(args.w_out, true), expert * f, f), d_act);
  } else {
    gemm(slice(sorted_dout(args.rows)), args.w_out.rows(expert * s.hidden, s.hidden), d_act);
  }
  if (save_ == MoeSave::rows) activation_.again(h, act);
  scale_by_weight(act, args.rows.weights().subspan(size_t(range.begin), size_t(range.count)), d_act,
                  slice(weighted_inner_.view(s.dtype, all, f)),
                  std::span(d_gate_weight_).subspan(size_t(range.begin), size_t(range.count)));
  activation_.backward(h, d_act, dh);
  if (quantization_) {
    quantize(dh, rows_of(dgate_up_codes_.view(all, 2 * f), range), quantization_->has_scales);
  }
}

MoeGemmCombineCpu::Call MoeLayerOnRanks::combine_call(const PassArgs& args) const {
  const MoeShape& s = coords_.shape;
  const int64_t f = coords_.ffn;
  if (quantization_) return quantized_combine_call(args);
  if (!args.is_backward()) {
    return {.rows = args.rows,
            .weighted = true,
            .product =
                [&s, rows = inner(args.rows), weight = args.w_out](int expert, Range slots,
                                                                   Range columns, const Tensor& y) {
                  gemm(rows.rows(slots.begin, slots.count),
                       weight.rows(expert * s.hidden + columns.begin, columns.count).transposed(),
                       y);
                },
            .out = args.out};
  }
  return {.rows = args.rows,
          .weighted = false,
          .product =
              [f, rows = dgate_up_.view(s.dtype, args.rows.slots(), 2 * f), weight = args.w_in](
                  int expert, Range slots, Range columns, const Tensor& y) {
                gemm(rows.rows(slots.begin, slots.count),
                     weight.rows(expert * 2 * f, 2 * f).narrow(1, columns.begin, columns.count), y);
              },
          .out = args.gradients.dx,
          .slot_values = d_gate_weight_,
          .row_values = args.gradients.dweights};
}

MoeGemmCombineCpu::Call MoeLayerOnRanks::quantized_combine_call(const PassArgs& args) const {
  const int64_t columns_in = args.is_backward() ? 2 * coords_.ffn : coords_.ffn;
  const QuantizedRows rows =
      (args.is_backward() ? dgate_up_codes_ : inner_codes_).view(args.rows.slots(), columns_in);
  MoeGemmCombineCpu::Call call{
      .rows = args.rows,
      .weighted = !args.is_backward(),
      .product =
          [this, rows, weight = args.is_backward() ? args.w_in : args.w_out,
           is_transposed = args.is_backward()](int expert, Range slots, Range columns,
                                               const Tensor& y) {
            const int64_t first = expert * coords_.shape.hidden + columns.begin;
            gemm(Exec{}, rows_of(rows, slots),
                 rows_of(quantization_->weight(weight, is_transposed), first, columns.count), y,
                 false);
          },
      .out = args.is_backward() ? args.gradients.dx : args.out};
  if (args.is_backward()) {
    call.slot_values = d_gate_weight_;
    call.row_values = args.gradients.dweights;
  }
  return call;
}

/// dW = dy^T x, or added to it, expert by expert.
void MoeLayerOnRanks::weight_gradient(const PassStep& step, const PassArgs& args) {
  const MoeShape& s = coords_.shape;
  const int64_t f = coords_.ffn, all = args.rows.slots();
  const bool is_in = step.step == MoeStep::dw_in,
             adds = args.gradients.mode == WeightGradients::add;
  if (is_in && save_ == MoeSave::rows) sort_again(args.rows);
  const Tensor computed = is_in ? dgate_up_.view(s.dtype, all, 2 * f)
                                : weighted_inner_.view(s.dtype, all, f),
               sent = is_in ? sorted_x(args.rows) : sorted_dout(args.rows);
  const Tensor& dw = is_in ? args.gradients.dw_in : args.gradients.dw_out;
  const int64_t features = is_in ? 2 * f : s.hidden;
  for (int expert = 0; expert < int(coords_.experts.count); ++expert) {
    const Range slots = args.rows.slots_of(expert);
    const Tensor other = computed.rows(slots.begin, slots.count);
    if (is_in) activation_.bias_backward(expert, other);
    if (slots.count == 0 && adds) continue;
    const Tensor values = values_of(sent, slots);
    gemm((is_in ? other : values).transposed(), is_in ? values : other,
         dw.rows(expert * features, features), {.accumulate = adds});
  }
}

void MoeLayerOnRanks::sort_again(const MoeRows& rows) const {
  const ScopedSpan span(SpanKind::compute, "moe_permute");
  const size_t row_bytes = sent_row_bytes();
  const Tensor to = sorted_x(rows),
               from = rows.distinct.view(sent_dtype(), rows.received(), sent_columns());
  for (int source = 0; source < coords_.world; ++source) {
    const std::byte* const begin =
        from.as<std::byte>() + size_t(rows.first_received(source)) * row_bytes;
    cpu::parallel_ranges(rows.arrived(source), cpu::kMinRows, [&](int64_t first, int64_t end) {
      for (int64_t row = first; row < end; ++row) {
        copy_to_slots(begin + size_t(row) * row_bytes, row_bytes, rows.uses(source, row),
                      to.as<std::byte>());
      }
    });
  }
}

void MoeLayerOnRanks::make_room(MoeRows& rows) {
  const MoeShape& s = coords_.shape;
  const int64_t slots = rows.slots(), f = coords_.ffn;
  (save_ == MoeSave::recompute ? gate_up_ : rows.gate_up).of(s.dtype, slots, 2 * f);
  (save_ == MoeSave::sorted ? rows.inner : inner_).of(s.dtype, slots, f);
  (save_ == MoeSave::sorted ? rows.x : x_).of(sent_dtype(), slots, sent_columns());
  if (save_ == MoeSave::rows) rows.distinct.of(sent_dtype(), rows.received(), sent_columns());
  if (quantization_) inner_codes_.of(slots, f);
}

void MoeLayerOnRanks::make_room_to_go_back(const MoeRows& rows) {
  const MoeShape& s = coords_.shape;
  const int64_t slots = rows.slots(), f = coords_.ffn;
  if (save_ != MoeSave::sorted) {
    x_.of(sent_dtype(), slots, sent_columns());
    inner_.of(s.dtype, slots, f);
  }
  if (save_ == MoeSave::recompute) gate_up_.of(s.dtype, slots, 2 * f);
  if (quantization_) {
    inner_codes_.of(slots, f);
    dgate_up_codes_.of(slots, 2 * f);
  }
  dout_.of(sent_dtype(), slots, sent_columns());
  d_act_.of(s.dtype, slots, f);
  weighted_inner_.of(s.dtype, slots, f);
  dgate_up_.of(s.dtype, slots, 2 * f);
  d_gate_weight_.resize(size_t(slots));
}

Tensor MoeLayerOnRanks::sorted_x(const MoeRows& rows) const {
  return (save_ == MoeSave::sorted ? rows.x : x_).view(sent_dtype(), rows.slots(), sent_columns());
}
Tensor MoeLayerOnRanks::sorted_dout(const MoeRows& rows) const {
  return dout_.view(sent_dtype(), rows.slots(), sent_columns());
}
Tensor MoeLayerOnRanks::gate_up(const MoeRows& rows) const {
  return (save_ == MoeSave::recompute ? gate_up_ : rows.gate_up)
      .view(coords_.shape.dtype, rows.slots(), 2 * coords_.ffn);
}
Tensor MoeLayerOnRanks::inner(const MoeRows& rows) const {
  return (save_ == MoeSave::sorted ? rows.inner : inner_)
      .view(coords_.shape.dtype, rows.slots(), coords_.ffn);
}

QuantizedRows MoeLayerOnRanks::QuantizedMemory::of(int64_t rows, int64_t columns) {
  codes.of(DType::e4m3, rows, columns);
  scales.of(DType::f32, rows, 1);
  return view(rows, columns);
}
QuantizedRows MoeLayerOnRanks::QuantizedMemory::view(int64_t rows, int64_t columns) const {
  const Tensor column = scales.view(DType::f32, rows, 1);
  return {codes.view(DType::e4m3, rows, columns), Tensor(column.data(), DType::f32, {rows})};
}

void MoeLayerOnRanks::run_forward(const Tensor& x, const MoeRouting& routing, const Tensor& w_in,
                                  const Tensor& w_out, const Tensor& out, MoeRows& rows,
                                  const std::function<void()>& meanwhile) {
  PassArgs args{.kind = PassArgs::Rows::forward,
                .rows = rows,
                .dispatched = make_sent(x),
                .w_in = w_in,
                .w_out = w_out,
                .filled = &rows,
                .routing = &routing,
                .out = out,
                .meanwhile = &meanwhile};
  rows.filled = {};
  rows.level = 0;
  run_pass(out.dims() > 0 ? make_forward : make_dispatch, args);
  if (save_ == MoeSave::recompute) copy_rows(x, coords_.row_bytes, rows.sent_rows);
  dispatch_.complete(rows);
}

void MoeLayerOnRanks::run_combine(const Tensor& w_out, const MoeRows& rows, const Tensor& out) {
  PassArgs args{.kind = PassArgs::Rows::forward, .rows = rows, .w_out = w_out, .out = out};
  run_pass(make_combine, args);
}

void MoeLayerOnRanks::run_backward(const Tensor& dout, const Tensor& w_in, const Tensor& w_out,
                                   const MoeRows& rows, const Gradients& gradients,
                                   BackwardHalf half) {
  make_room_to_go_back(rows);
  if (save_ == MoeSave::recompute && half == BackwardHalf::both) {
    PassArgs again{.kind = PassArgs::Rows::again,
                   .rows = rows,
                   .dispatched = make_sent(rows.sent_rows.view(
                       coords_.shape.dtype, rows.local_rows(), coords_.shape.hidden)),
                   .w_in = w_in};
    run_pass(make_dispatch, again);
  }
  PassArgs args{.kind = PassArgs::Rows::gradients,
                .rows = rows,
                .dispatched = make_sent(dout),
                .w_in = w_in,
                .w_out = w_out,
                .gradients = gradients,
                .meanwhile = gradients.meanwhile};
  switch (half) {
    case BackwardHalf::dispatch:
      return run_pass(make_dispatch_backward, args);
    case BackwardHalf::combine:
      return run_pass(make_combine_backward, args);
    case BackwardHalf::both:
      return run_pass(make_backward, args);
  }
}

}  // namespace tandem
