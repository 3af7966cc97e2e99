// Which ways there are to run a layer of experts, and which is the fastest.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "comm/gpus.h"
#include "core/cuda/check.h"
#include "core/cuda/fill.h"
#include "overlap/cuda/moe_memory.h"
#include "overlap/cuda/moe_on_gpus.h"
#include "overlap/moe_load.h"
#include "tune/cuda/measure.h"
#include "tune/tuner.h"

namespace tandem::gpu {
namespace {

using namespace schedule;

/// " as int8, back as int4:g32"; "": both plain.
std::string wires_text(const Wire& dispatch, const Wire& combine) {
  if (dispatch.is_none() && combine.is_none()) return "";
  if (dispatch == combine) return " as " + dispatch.describe();
  const auto text = [](const Wire& wire) {
    return wire.is_none() ? std::string("plain") : "as " + wire.describe();
  };
  return fmt::format(" {}, back {}", text(dispatch), text(combine));
}
}  // namespace

std::string wires_of(const MoeOptions& options) {
  return wires_text(options.dispatch, options.combine) + (options.or_plain ? " or plain" : "");
}

std::string MoeWay::describe() const {
  const std::string wires = wires_text(dispatch, combine);
  if (is_serial()) return "serial" + wires;
  return fmt::format("{}, {} blocks send{}, {} part{}{}", sorts ? "sorted first" : "fused",
                     sending_blocks, sorts ? " sums" : "", parts, parts == 1 ? "" : "s", wires);
}

void MoeOnGpus::add_ways(const MoeOptions& options, const Wire& dispatch, const Wire& combine) {
  const auto add = [&](int blocks, int parts, bool sorts) {
    add_way({blocks, parts, sorts, dispatch, combine});
  };
  if (options.strategy != Strategy::overlapped || comm_.size() == 1) add(0, 1, sorts_);
  if (options.strategy == Strategy::serial || comm_.size() == 1) return;
  const int sms = comm_.share().sms();
  int last = 0;
  for (const int share : {16, 8, 4}) {
    const int blocks = std::max(1, sms / share);
    if (blocks == last || blocks >= sms) continue;  // products need one, too
    last = blocks;
    for (const int parts : {1, 2, kMostMoeParts}) {
      if (parts > 1 && place_.shape.hidden <= (parts - 1) * kGroupedColumns) continue;
      add(blocks, parts, false);
      if (sorts_ && parts > 1) add(blocks, parts, true);
    }
  }
}

/// Tiles of the first product that a block has had, about, when its rank's rows are sent: at
/// 300 GB/s, or an emulated link's rate, and 660 TFLOP/s of 132 SMs.
int MoeOnGpus::tiles_while_rows_leave() const {
  constexpr double kBytesOfUs = 300e3, kFlopsOfUs = 5e6;
  const EmulatedLink* const link = comm_.emulated_link();
  const double bytes_of_us = link ? std::min(kBytesOfUs, link->bytes_per_s / 1e6) : kBytesOfUs;
  const MoeShape& s = place_.shape;
  const double ranks = double(place_.world) / s.tp;
  const double share = 1 - std::pow(1 - 1 / ranks, s.top_k);  // of the rows, to each other rank
  const double bytes = double(s.tokens) * share * (place_.world - 1) * double(space_.row_bytes());
  const double flops = 2.0 * kGroupedRows * kGroupedColumns * double(s.hidden);
  return std::clamp(int(std::ceil(bytes / bytes_of_us / (flops / kFlopsOfUs))), 1, 1 << 12);
}

// What sends rows ends by itself, and its SMs join the first product; not where a kernel that
// decodes follows, which those blocks would keep from starting. What sends sums needs its SMs
// beside all parts of the second product but the first.
void MoeOnGpus::add_way(const MoeWay& way) {
  Tables tables;
  if (way.sends_rows_beside()) {
    tables.in = in_->add_table({.spare_blocks = way.sending_blocks,
                                .joining_after = way.encodes() ? 0 : tiles_while_rows_leave(),
                                .staged = true});
  } else {
    tables.in = in_of(way).add_table({});
  }
  for (int part = 0; part < way.parts; ++part) {
    const Range columns = moe_columns(place_.shape.hidden, way.parts, part, kGroupedColumns);
    if (columns.count == 0) continue;
    tables.columns.push_back(columns);
    tables.out.push_back(out_->add_table(
        {.spare_blocks = part == 0 ? 0 : way.sending_blocks,
         .first_column = int(columns.begin / kGroupedColumns),
         .column_tiles = int((columns.count + kGroupedColumns - 1) / kGroupedColumns)}));
  }
  ways_.push_back(way);
  tables_.push_back(std::move(tables));
}

/// On rows that are spread evenly: the routing of a real call is not known yet.
void MoeOnGpus::choose(const MoeOptions& options) {
  const MoeShape& s = place_.shape;
  const int64_t own = s.tokens;
  std::vector<std::string> names;
  for (const MoeWay& way : ways_) names.push_back(way.describe());
  const auto measure = [&] {
    const int64_t in_rows = place_.experts.count * 2 * place_.ffn,
                  out_rows = place_.experts.count * s.hidden;
    const DeviceMemory x = values(own, s.hidden), w_in = values(in_rows, s.hidden),
                       w_out = values(out_rows, place_.ffn), out = values(own, s.hidden),
                       experts = ints(space_.choices()), weights = ints(space_.choices());
    const Tensor on_x = x.view(s.dtype, {own, s.hidden}),
                 on_out = out.view(s.dtype, {own, s.hidden}),
                 on_in = w_in.view(s.dtype, {in_rows, s.hidden}),
                 on_w_out = w_out.view(s.dtype, {out_rows, place_.ffn});
    const MoeRouting routing{experts.view(DType::i32, {own, s.top_k}),
                             weights.view(DType::f32, {own, s.top_k})};
    const std::vector<int32_t> chosen =
        chosen_experts(place_.grid, s.top_k, {1, 1}, own * place_.rank, own);
    check(cudaMemcpyAsync(experts.data(), chosen.data(), chosen.size() * sizeof chosen[0],
                          cudaMemcpyDefault, comm_.stream()),
          "moe");
    fill_uniform(on_x, 1, 1, 0, comm_.stream());
    fill_uniform(on_in, 1, 2, 0, comm_.stream());
    fill_uniform(on_w_out, 1, 3, 0, comm_.stream());
    fill_uniform(routing.weights, 1, 4, 0, comm_.stream());
    const std::unique_ptr<MoeKept> kept = make_kept();
    comm_.synchronize();  // the host's routing has been read
    std::vector<Alternative> alternatives;
    for (size_t way = 0; way < ways_.size(); ++way) {
      alternatives.push_back(
          {names[way], [&, way] { run(way, on_x, routing, on_in, on_w_out, on_out, kept.get()); }});
    }
    std::vector<double> us;
    for (const Timing& timing : Stopwatch(comm_).measure(alternatives, {.repeats = 9})) {
      us.push_back(timing.median_us);
    }
    return us;
  };
  const std::string key = fmt::format(
      "{} | {} | {} x{} | moe {}{}{}", this_machines_gpus().name, comm_.transport(), comm_.link(),
      comm_.size(), place_.describe(), wires_of(options), trains() ? " for backward" : "");
  chosen_ = tandem::choose(comm_, key, names, measure, kOverSerial);
}

}  // namespace tandem::gpu
