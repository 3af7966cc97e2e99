// Candidates for running an MoE layer, and the choice of the fastest.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "comm/world/gpus.h"
#include "core/cuda/check.h"
#include "core/cuda/fill.h"
#include "core/cuda/upload.h"
#include "overlap/moe/cuda/layer.h"
#include "overlap/moe/cuda/memory.h"
#include "overlap/moe/cuda/pace.h"
#include "overlap/moe/load.h"
#include "tune/cuda/measure.h"
#include "tune/tuner.h"

namespace tandem::gpu {
namespace {

using namespace schedule;

/// " as int8, back as int4:g32"; "" if both directions are uncompressed.
std::string wires_text(const Wire& dispatch, const Wire& combine) {
  if (dispatch.is_none() && combine.is_none()) return "";
  if (dispatch == combine) return " as " + dispatch.describe();
  const auto text = [](const Wire& wire) {
    return wire.is_none() ? std::string("uncompressed") : "as " + wire.describe();
  };
  return fmt::format(" {}, back {}", text(dispatch), text(combine));
}

/// Operands of a forward pass with evenly spread rows: the routing of a real call is not known yet.
struct ForwardOperands {
  ForwardOperands(GpuCommunicator& comm, const MoeRankCoords& coords, const MoeSpace& space)
      : x_memory(values(space.tokens, space.hidden)),
        in_memory(values(coords.experts.count * 2 * coords.ffn, space.hidden)),
        w_out_memory(values(coords.experts.count * space.hidden, coords.ffn)),
        out_memory(values(space.tokens, space.hidden)),
        experts(uploaded(chosen_experts(coords.grid, space.top_k, {1, 1},
                                        space.tokens * coords.rank, space.tokens))),
        weights(ints(space.routings())),
        x(x_memory.view(coords.shape.dtype, {space.tokens, space.hidden})),
        w_in(in_memory.view(coords.shape.dtype,
                            {coords.experts.count * 2 * coords.ffn, space.hidden})),
        w_out(w_out_memory.view(coords.shape.dtype,
                                {coords.experts.count * space.hidden, coords.ffn})),
        out(out_memory.view(coords.shape.dtype, {space.tokens, space.hidden})),
        routing{experts.view(DType::i32, {space.tokens, space.top_k}),
                weights.view(DType::f32, {space.tokens, space.top_k})} {
    uint64_t stream = 0;
    for (const Tensor& each : {x, w_in, w_out, routing.weights}) {
      fill_uniform(each, 1, ++stream, 0, comm.stream());
    }
  }
  DeviceMemory x_memory, in_memory, w_out_memory, out_memory, experts, weights;
  Tensor x, w_in, w_out, out;
  MoeRouting routing;
};

/// Further ones of a backward pass.
struct BackwardOperands {
  BackwardOperands(GpuCommunicator& comm, const ForwardOperands& of)
      : dout_memory(of.x.bytes()),
        dx_memory(of.x.bytes()),
        dweights_memory(of.routing.weights.bytes()),
        dw_in_memory(size_t(of.w_in.elements()) * sizeof(float)),
        dw_out_memory(size_t(of.w_out.elements()) * sizeof(float)),
        dout(dout_memory.view(of.x.dtype(), {of.x.dim(0), of.x.dim(1)})),
        dx(dx_memory.view(of.x.dtype(), {of.x.dim(0), of.x.dim(1)})),
        dweights(dweights_memory.view(DType::f32,
                                      {of.routing.weights.dim(0), of.routing.weights.dim(1)})),
        dw_in(dw_in_memory.view(DType::f32, {of.w_in.dim(0), of.w_in.dim(1)})),
        dw_out(dw_out_memory.view(DType::f32, {of.w_out.dim(0), of.w_out.dim(1)})) {
    fill_uniform(dout, 1, 5, 0, comm.stream());
  }
  DeviceMemory dout_memory, dx_memory, dweights_memory, dw_in_memory, dw_out_memory;
  Tensor dout, dx, dweights, dw_in, dw_out;
};

template <typename Candidates>
std::vector<std::string> names_of(const Candidates& candidates) {
  std::vector<std::string> names;
  for (const auto& candidate : candidates) names.push_back(candidate.name);
  return names;
}
}  // namespace

std::string wires_of(const MoeOptions& options) {
  return wires_text(options.dispatch, options.combine) +
         (options.allow_uncompressed ? " or uncompressed" : "");
}

std::string MoeOnGpus::Blocks::describe() const {
  const std::string wires = wires_text(dispatch, combine);
  if (pushes) {
    return overlaps_sort() ? fmt::format("pushed, {} blocks overlap the sort", sorting_blocks)
                           : fmt::format("pushed, {}", sorts ? "sorted first" : "gathered");
  }
  if (is_serial() && !overlaps_sort()) return "serial" + wires;
  if (is_serial())
    return fmt::format("serial, {} blocks overlap the sort{}", sorting_blocks, wires);
  if (overlaps_sort()) {
    const std::string sort = sends_while_sorting() ? fmt::format("{} blocks send, {} sort",
                                                                 sending_blocks, sorting_blocks)
                                                   : fmt::format("{} blocks sort", sorting_blocks);
    return fmt::format("overlapped_sort, {}, {} sum{}", sort, summing_blocks, wires);
  }
  return fmt::format("{}, {} blocks send{}, {} column group{}{}", sorts ? "sorted first" : "fused",
                     sending_blocks, sorts ? " sums" : "", column_groups,
                     column_groups == 1 ? "" : "s", wires);
}

void MoeOnGpus::add_candidates(const MoeOptions& options, const Wire& dispatch,
                               const Wire& combine) {
  const auto add = [&](int blocks, int column_groups, bool sorts, int sorting = 0,
                       int summing = 0) {
    add_candidate({blocks, column_groups, sorts, sorting, summing, dispatch, combine});
  };
  const auto add_pushed = [&](bool sorts, int sorting) {
    add_candidate({.sorts = sorts, .sorting_blocks = sorting, .pushes = true});
  };
  const int sms = comm_.share().sms();
  // With paired blocks an odd number would leave one unpaired (ConcurrentBlocks).
  const auto share = [&](int divisor) {
    const int blocks = std::max(1, sms / divisor);
    return experts_.paired ? (blocks + 1) / 2 * 2 : blocks;
  };
  if (options.strategy != Strategy::overlapped || comm_.size() == 1) {
    add(0, 1, sorts_);
    for (const int divisor : {16, 11, 8}) {
      if (sorts_ && share(divisor) < sms) add(0, 1, true, share(divisor));
    }
  }
  if (options.strategy == Strategy::serial || comm_.size() == 1) return;
  for (const int divisor : {16, 8, 4}) {
    const int blocks = share(divisor);
    if (blocks >= sms) continue;  // the GEMMs need one, too
    for (const int column_groups : {1, 2, kMaxColumnGroups}) {
      if (column_groups > 1 && coords_.shape.hidden <= (column_groups - 1) * kGroupedColumns)
        continue;
      add(blocks, column_groups, false);
      if (sorts_ && column_groups > 1) add(blocks, column_groups, true);
    }
  }
  for (const auto& [sending, sorting] : {std::pair{32, 16}, {16, 16}, {16, 8}, {8, 16}}) {
    if (!sorts_ || share(sending) + share(sorting) >= sms) continue;
    // Messages have been sent before, so any number of sending blocks will do.
    if (!dispatch.is_none() && sending != 16) continue;
    add(share(sending), 1, true, share(sorting), share(6));
  }
  if (!dispatch.is_none() || !combine.is_none()) return;
  add_pushed(false, 0);
  for (const int divisor : {0, 16, 11, 8}) {
    const int sorting = divisor == 0 ? 0 : share(divisor);
    if (sorts_ && sorting < sms) add_pushed(true, sorting);
  }
}

/// Microseconds to send a row to another rank.
double MoeOnGpus::us_to_send_row(int blocks) const {
  const auto bytes = double(space_.row_bytes());
  const EmulatedLink* const link = comm_.emulated_link();
  const double us = bytes * sending_us_of_byte(blocks);
  return link ? std::max(us, bytes / link->bytes_per_s * 1e6) : us;
}

/// Estimates when the sorting blocks, which may send first, finish and join the GEMM.
Joining MoeOnGpus::joining_sorters(const Blocks& candidate) const {
  constexpr double kMargin = 1.1;
  const int blocks = candidate.blocks_while_sorting();
  const double tiles = tiles_of_us(coords_.shape.hidden) * kMargin;
  Joining joining;
  joining.of_row = float(double(space_.row_bytes()) * sorting_us_of_byte(blocks) * tiles);
  if (candidate.sends_while_sorting()) {
    const double sending = us_to_send_row(candidate.sending_blocks) * tiles;
    joining.of_leaving = float(sending * candidate.sending_blocks / blocks);
    joining.min_of_leaving = float(sending);
  }
  return joining;
}

/// The send kernel exits on its own and its SMs join the first GEMM, unless a decode kernel
/// follows: joining would delay its start.
Joining MoeOnGpus::joining_senders(const Blocks& candidate) const {
  if (candidate.encodes()) return {};
  return {.of_leaving =
              float(us_to_send_row(candidate.sending_blocks) * tiles_of_us(coords_.shape.hidden))};
}

// Adds a candidate, unless it is there, and its tables. Sums need SMs during all column groups of the second GEMM but
// the first.
void MoeOnGpus::add_candidate(const Blocks& candidate) {
  if (std::ranges::find(blocks_, candidate) != blocks_.end()) return;
  Tables tables;
  const MoeShape& s = coords_.shape;
  if (candidate.overlaps_sort()) {
    tables.in = in_sorted_->add_table({.reserved_blocks = candidate.blocks_while_sorting(),
                                       .joining = joining_sorters(candidate),
                                       .staged = true,
                                       .ordered = true});
  } else if (candidate.overlaps_rows()) {
    tables.in = in_->add_table({.reserved_blocks = candidate.sending_blocks,
                                .joining = joining_senders(candidate),
                                .staged = true});
  } else {
    tables.in = in_of(candidate).add_table({.staged = candidate.pushes && !candidate.sorts});
  }
  if (candidate.pushes || (candidate.overlaps_sort() && !candidate.is_serial())) {
    tables.columns = {{0, s.hidden}};
    tables.out = {out_->add_table({.tiles = GroupedTiles::remote}),
                  out_->add_table(
                      {.reserved_blocks = candidate.summing_blocks, .tiles = GroupedTiles::local})};
  } else {
    for (int column_group = 0; column_group < candidate.column_groups; ++column_group) {
      const Range columns =
          moe_columns(s.hidden, candidate.column_groups, column_group, kGroupedColumns);
      if (columns.count == 0) continue;
      tables.columns.push_back(columns);
      tables.out.push_back(out_->add_table(
          {.reserved_blocks = column_group == 0 ? 0 : candidate.sending_blocks,
           .first_column = int(columns.begin / kGroupedColumns),
           .column_tiles = int((columns.count + kGroupedColumns - 1) / kGroupedColumns)}));
    }
  }
  add_choice(candidate);
  passes_.push_back(make_forward(form_of(candidate, tables.columns.size())));
  tables_.push_back(std::move(tables));
}

void MoeOnGpus::add_choice(const Blocks& blocks) {
  candidates_.push_back(
      {.name = blocks.describe(),
       .form = blocks.is_serial() ? Strategy::serial : Strategy::overlapped,
       .run =
           [this, number = candidates_.size()](
               const Tensor& x, const MoeRouting& routing, const Tensor& w_in, const Tensor& w_out,
               const Tensor& out, MoeSavedActivations* activations, const MoeOfLayer& layer) {
             run(number, x, routing, w_in, w_out, out, activations, &layer);
           },
       .encoded = blocks.encodes(),
       .chunks = blocks.column_groups});
  blocks_.push_back(blocks);
}

std::string MoeOnGpus::BackwardBlocks::describe() const {
  if (is_serial()) return "serial";
  if (pushes) {
    return overlaps_sort() ? fmt::format("pushed, {} blocks overlap the sort", sorting_blocks)
                           : "pushed";
  }
  const std::string rows =
      overlaps_sort() ? fmt::format("{} blocks send, {} sort, ", sending_blocks, sorting_blocks)
                      : std::string();
  return fmt::format("{}{} sum", rows, summing_blocks);
}

/// Tiles of the first weight's gradients that a block computes while `blocks` others send sums.
LateBlocks MoeOnGpus::late_summing(int blocks) const {
  if (blocks == 0) return {};
  const int64_t rows = coords_.usual_rows(), others = coords_.world - 1;
  const auto read = double(rows * others / coords_.world) * double(space_.row_bytes());
  const double sent = std::min<double>(read, double(others * space_.tokens * space_.row_bytes()));
  const double us = std::max(read * summing_us_of_byte(blocks), sent * sending_us_of_byte(blocks));
  const int64_t rows_of_expert = std::max<int64_t>(1, rows / coords_.experts.count);
  return {blocks, int(std::ceil(us / us_of_gradient_tile(rows_of_expert)))};
}

void MoeOnGpus::add_backward_candidate(const BackwardBlocks& blocks) {
  if (std::ranges::find(backward_, blocks, &BackwardForm::blocks) != backward_.end()) return;
  BackwardForm form{.blocks = blocks, .late = late_summing(blocks.summing_blocks)};
  schedule::MoePassForm pass{
      .sends = comm_.size() > 1, .has_gate_step = true, .sums = SumExchange::under_weights};
  if (blocks.pushes) {
    pass.rows = RowExchange::pushed;
    pass.sums = SumExchange::pushed;
  } else if (blocks.overlaps_sort()) {
    pass.rows = RowExchange::while_sorting;
  }
  if (blocks.overlaps_sort()) {
    const Blocks rows{.sending_blocks = blocks.sending_blocks,
                      .sorts = true,
                      .sorting_blocks = blocks.sorting_blocks,
                      .pushes = blocks.pushes};
    form.d_act_table = gradients_->add_d_act_table({.reserved_blocks = rows.blocks_while_sorting(),
                                                    .joining = joining_sorters(rows),
                                                    .staged = true,
                                                    .ordered = true});
  }
  form.pass = make_backward(pass);
  backward_candidates_.push_back(
      {blocks.describe(), blocks.is_serial() ? Strategy::serial : Strategy::overlapped});
  backward_.push_back(std::move(form));
}

void MoeOnGpus::add_backward_candidates(Strategy strategy) {
  if (strategy != Strategy::overlapped || comm_.size() == 1) add_backward_candidate({});
  if (strategy == Strategy::serial || comm_.size() == 1) return;
  const int sms = comm_.share().sms();
  const auto share = [&](int divisor) {
    const int blocks = std::max(1, sms / divisor);
    return experts_.paired ? (blocks + 1) / 2 * 2 : blocks;
  };
  if (share(6) < sms) add_backward_candidate({.summing_blocks = share(6)});
  for (const auto& [sending, sorting] : {std::pair{16, 8}, {8, 16}}) {
    if (share(sending) + share(sorting) >= sms) continue;
    add_backward_candidate({share(sending), share(sorting), share(6)});
  }
  add_backward_candidate({.pushes = true});
  for (const int divisor : {16, 11, 8, 6}) {
    if (share(divisor) >= sms) continue;
    add_backward_candidate({.sorting_blocks = share(divisor), .pushes = true});
  }
}

std::string MoeOnGpus::tuning_key(const MoeOptions& options, const char* pass) const {
  return fmt::format("{} | {} | {} x{} | moe {}{}{}", this_machines_gpus().name, comm_.transport(),
                     comm_.link(), comm_.size(), coords_.describe(), wires_of(options), pass);
}

void MoeOnGpus::choose(const MoeOptions& options) {
  std::unique_ptr<ForwardOperands> f;
  std::unique_ptr<MoeSavedActivations> activations;
  const auto make_operands = [&] {
    if (f) return;
    comm_.agree_on("moe: memory to measure on", [&] {
      f = std::make_unique<ForwardOperands>(comm_, coords_, space_);
      activations = make_saved();
    });
  };
  const auto run_forward = [&](size_t candidate) {
    run(candidate, f->x, f->routing, f->w_in, f->w_out, f->out, activations.get());
  };
  const auto measure = [&](const std::vector<std::string>& names,
                           const std::function<void(size_t)>& run_one) {
    std::vector<BoundCandidate> alternatives;
    for (size_t i = 0; i < names.size(); ++i) {
      alternatives.push_back({.name = names[i], .run = [&, i] { run_one(i); }});
    }
    std::vector<double> us;
    for (const Timing& timing : Stopwatch(comm_).measure(alternatives, {.repeats = 9})) {
      us.push_back(timing.median_us);
    }
    return us;
  };
  if (candidates_.size() > 1) {
    const std::vector<std::string> names = names_of(candidates_);
    chosen_ = tandem::choose(
        comm_, tuning_key(options, trains() ? " for backward" : ""), names,
        [&] {
          make_operands();
          return measure(names, run_forward);
        },
        kOverSerial);
  }
  if (backward_candidates_.size() < 2) return;
  const std::vector<std::string> names = names_of(backward_candidates_);
  chosen_backward_ = tandem::choose(
      comm_, tuning_key(options, " backward"), names,
      [&] {
        make_operands();
        std::unique_ptr<BackwardOperands> b;
        comm_.agree_on("moe: memory to measure a backward pass on",
                       [&] { b = std::make_unique<BackwardOperands>(comm_, *f); });
        run_forward(chosen_);
        return measure(names, [&](size_t candidate) {
          run_backward(candidate, b->dout, f->w_in, f->w_out, *activations, b->dx, b->dweights,
                       b->dw_in, b->dw_out, WeightGradients::store);
        });
      },
      kOverSerial);
}

}  // namespace tandem::gpu
