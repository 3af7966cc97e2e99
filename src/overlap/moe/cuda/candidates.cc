// Candidates for running an MoE layer, and the choice of the fastest.
#include <fmt/format.h>

#include <algorithm>
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
}  // namespace

std::string wires_of(const MoeOptions& options) {
  return wires_text(options.dispatch, options.combine) +
         (options.allow_uncompressed ? " or uncompressed" : "");
}

std::string MoeOnGpus::Blocks::describe() const {
  const std::string wires = wires_text(dispatch, combine);
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
    const Blocks candidate{blocks, column_groups, sorts, sorting, summing, dispatch, combine};
    if (std::ranges::find(blocks_, candidate) == blocks_.end()) add_candidate(candidate);
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

// Adds a candidate and its tables. Sums need SMs during all column groups of the second GEMM but
// the first.
void MoeOnGpus::add_candidate(const Blocks& candidate) {
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
    tables.in = in_of(candidate).add_table({});
  }
  if (candidate.overlaps_sort() && !candidate.is_serial()) {
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

/// Measures with evenly spread rows: the routing of a real call is not known yet.
void MoeOnGpus::choose(const MoeOptions& options) {
  const MoeShape& s = coords_.shape;
  const int64_t local = s.tokens;
  std::vector<std::string> names;
  for (const MoeForward& candidate : candidates_) names.push_back(candidate.name);
  const auto measure = [&] {
    const int64_t in_rows = coords_.experts.count * 2 * coords_.ffn,
                  out_rows = coords_.experts.count * s.hidden;
    DeviceMemory x, w_in, w_out, out, experts, weights;
    std::unique_ptr<MoeSavedActivations> activations;
    comm_.agree_on("moe: memory to measure on", [&] {
      x = values(local, s.hidden), w_in = values(in_rows, s.hidden);
      w_out = values(out_rows, coords_.ffn), out = values(local, s.hidden);
      experts =
          uploaded(chosen_experts(coords_.grid, s.top_k, {1, 1}, local * coords_.rank, local));
      weights = ints(space_.routings());
      activations = make_saved();
    });
    const Tensor on_x = x.view(s.dtype, {local, s.hidden}),
                 on_out = out.view(s.dtype, {local, s.hidden}),
                 on_in = w_in.view(s.dtype, {in_rows, s.hidden}),
                 on_w_out = w_out.view(s.dtype, {out_rows, coords_.ffn});
    const MoeRouting routing{experts.view(DType::i32, {local, s.top_k}),
                             weights.view(DType::f32, {local, s.top_k})};
    fill_uniform(on_x, 1, 1, 0, comm_.stream());
    fill_uniform(on_in, 1, 2, 0, comm_.stream());
    fill_uniform(on_w_out, 1, 3, 0, comm_.stream());
    fill_uniform(routing.weights, 1, 4, 0, comm_.stream());
    std::vector<BoundCandidate> alternatives;
    for (size_t candidate = 0; candidate < candidates_.size(); ++candidate) {
      alternatives.push_back({.name = names[candidate], .run = [&, candidate] {
                                run(candidate, on_x, routing, on_in, on_w_out, on_out,
                                    activations.get());
                              }});
    }
    std::vector<double> us;
    for (const Timing& timing : Stopwatch(comm_).measure(alternatives, {.repeats = 9})) {
      us.push_back(timing.median_us);
    }
    return us;
  };
  const std::string key = fmt::format(
      "{} | {} | {} x{} | moe {}{}{}", this_machines_gpus().name, comm_.transport(), comm_.link(),
      comm_.size(), coords_.describe(), wires_of(options), trains() ? " for backward" : "");
  chosen_ = tandem::choose(comm_, key, names, measure, kOverSerial);
}

}  // namespace tandem::gpu
