// Candidates for the passes of an MoE layer; choice.cc measures them.
#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "overlap/moe/cuda/layer.h"
#include "overlap/moe/cuda/pace.h"

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

/// Shares of the SMs that sort concurrently with the first GEMM of a pass, without sending.
constexpr int kSortingDivisors[] = {16, 11, 8, 6};

int MoeOnGpus::divided_sms(int divisor) const {
  const int blocks = std::max(1, comm_.share().sms() / divisor);
  return experts_.paired ? (blocks + 1) / 2 * 2 : blocks;
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
  if (options.strategy != Strategy::overlapped || comm_.size() == 1) {
    add(0, 1, sorts_);
    for (const int divisor : kSortingDivisors) {
      if (sorts_ && divided_sms(divisor) < sms) add(0, 1, true, divided_sms(divisor));
    }
  }
  if (options.strategy == Strategy::serial || comm_.size() == 1) return;
  for (const int divisor : {16, 8, 4}) {
    const int blocks = divided_sms(divisor);
    if (blocks >= sms) continue;  // the GEMMs need one, too
    for (const int column_groups : {1, 2, kMaxColumnGroups}) {
      if (column_groups > 1 && coords_.shape.hidden <= (column_groups - 1) * kGroupedColumns)
        continue;
      add(blocks, column_groups, false);
      if (sorts_ && column_groups > 1) add(blocks, column_groups, true);
    }
  }
  for (const auto& [sending, sorting] : {std::pair{32, 16}, {16, 16}, {16, 8}, {8, 16}}) {
    if (!sorts_ || divided_sms(sending) + divided_sms(sorting) >= sms) continue;
    // Messages have been sent before, so any number of sending blocks will do.
    if (!dispatch.is_none() && sending != 16) continue;
    add(divided_sms(sending), 1, true, divided_sms(sorting), divided_sms(6));
  }
  if (!can_push(options) || !dispatch.is_none() || !combine.is_none()) return;
  add_pushed(false, 0);
  if (!sorts_) return;
  add_pushed(true, 0);
  for (const int divisor : kSortingDivisors) {
    if (divided_sms(divisor) < sms) add_pushed(true, divided_sms(divisor));
  }
}

/// Microseconds to send a row to another rank.
double MoeOnGpus::us_to_send_row(int blocks) const {
  const auto bytes = double(space_.row_bytes());
  const EmulatedLink* const link = comm_.emulated_link();
  const double us = bytes * sending_us_of_byte(blocks);
  return link ? std::max(us, bytes / link->bytes_per_s * 1e6) : us;
}

constexpr double kSortingMargin = 1.1;

/// Estimates when the sorting blocks finish and join the GEMM.
Joining MoeOnGpus::joining_sorters(int blocks) const {
  const double tiles = tiles_of_us(coords_.shape.hidden) * kSortingMargin;
  return {.of_row = float(double(space_.row_bytes()) * sorting_us_of_byte(blocks) * tiles)};
}

/// The sorting blocks may send first.
Joining MoeOnGpus::joining_sorters(const Blocks& candidate) const {
  const int blocks = candidate.blocks_while_sorting();
  Joining joining = joining_sorters(blocks);
  if (candidate.sends_while_sorting()) {
    const double tiles = tiles_of_us(coords_.shape.hidden) * kSortingMargin;
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

// Adds a candidate, unless it is there, and its tables. Sums need SMs during all column groups of
// the second GEMM but the first.
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
  if (!pushes) return "serial";
  return overlaps_sort() ? fmt::format("pushed, {} blocks overlap the sort", sorting_blocks)
                         : "pushed";
}

void MoeOnGpus::add_backward_candidate(const BackwardBlocks& blocks) {
  if (std::ranges::find(backward_, blocks, &BackwardForm::blocks) != backward_.end()) return;
  BackwardForm form{.blocks = blocks};
  schedule::MoePassForm pass{
      .sends = comm_.size() > 1, .has_gate_step = true, .sums = SumExchange::under_weights};
  if (blocks.pushes) {
    pass.rows = RowExchange::pushed;
    pass.sums = SumExchange::pushed;
  }
  if (blocks.overlaps_sort()) {
    form.d_act_table =
        gradients_->add_d_act_table({.reserved_blocks = blocks.sorting_blocks,
                                     .joining = joining_sorters(blocks.sorting_blocks),
                                     .staged = true,
                                     .ordered = true});
  }
  form.pass = make_backward(pass);
  backward_candidates_.push_back(
      {blocks.describe(), blocks.pushes ? Strategy::overlapped : Strategy::serial});
  backward_.push_back(std::move(form));
}

void MoeOnGpus::add_backward_candidates(const MoeOptions& options) {
  const bool pushes = can_push(options);
  if (options.strategy != Strategy::overlapped || !pushes) add_backward_candidate({});
  if (!pushes) return;
  add_backward_candidate({.pushes = true});
  const int sms = comm_.share().sms();
  for (const int divisor : kSortingDivisors) {
    const int sorting = divided_sms(divisor);
    if (sorting < sms) add_backward_candidate({.pushes = true, .sorting_blocks = sorting});
  }
}

bool MoeOnGpus::may_push() const {
  return std::ranges::any_of(blocks_, &Blocks::pushes) ||
         std::ranges::any_of(backward_,
                             [](const BackwardForm& form) { return form.blocks.pushes; });
}

}  // namespace tandem::gpu
