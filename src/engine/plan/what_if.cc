#include "engine/plan/what_if.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>

#include "core/system/json.h"
#include "engine/plan/what_if_assets.h"
#include "engine/report/page_assets.h"
#include "engine/report/page_text.h"
#include "tandem/error.h"

namespace tandem::plan {
namespace {

using Json = nlohmann::ordered_json;

constexpr double kValueBytes = 2, kRateUnit = 1e9;

/// A row of the page: a layout with the ZeRO stages that it can run with.
struct WhatIfRow {
  RunRow row;
  StepWork work;
  LayoutExchanges exchanges;
  std::vector<int> stages;
  double seconds = std::numeric_limits<double>::infinity();  ///< of the fastest stage that fits
};

double peak_bytes(const RunRow& row, int zero, const CodecPolicy& codec = {}) {
  return working_bytes(row) + state_bytes(row, {zero, codec});
}

/// Peaks in GiB with formats of gradients and weights: gradients exact or lossy, for each weights
/// in no format, an exact one, a lossy one.
Json dp_peaks(const RunRow& row, int zero) {
  const Wire exact{.codec = Codec::lossless}, lossy{.codec = Codec::int8};
  Json peaks = Json::array();
  for (const Wire& gradients : {exact, lossy}) {
    for (const Wire& weights : {Wire{}, exact, lossy}) {
      peaks.push_back(peak_bytes(row, zero, {.gradients = gradients, .weights = weights}) / kGiB);
    }
  }
  return peaks;
}

/// Work of a row with a ZeRO stage and without wire formats.
StepWork staged_work(const WhatIfRow& entry, const GpuSpec& gpu, int zero) {
  return work_in_formats(entry.row, gpu, entry.work, entry.exchanges, {zero, {}});
}

Json row_json(const WhatIfRow& entry, const GpuSpec& gpu, const WhatIfParams& params) {
  const auto& [row, work, exchanges, stages, seconds] = entry;
  const auto bytes = [](const Exchange& exchange) { return kValueBytes * exchange.elements; };
  // The bytes that stay uncompressed, by the share of time that they take on the same link.
  const auto all_bytes = [&](const Exchange& exchange, double seconds_left) {
    if (exchange.seconds == 0) return 0.0;
    return bytes(exchange) * (1 + seconds_left / exchange.seconds);
  };
  const auto rings = weight_rings(row, gpu);
  const double optimizer = params.factors[size_t(Term::optimizer)];
  const bool has_dp_formats = params.limits.dp_formats && row.dp > 1;
  Json variants = Json::array();
  for (const int zero : stages) {
    variants.push_back({zero, peak_bytes(row, zero) / kGiB,
                        optimizer * staged_work(entry, gpu, zero).optimizer,
                        has_dp_formats && zero > 0 ? dp_peaks(row, zero) : Json::array()});
  }
  CodecPolicy lossy;
  lossy.gradients = {.codec = Codec::int8};
  const double residual =
      work_in_formats(row, gpu, work, exchanges, {1, lossy}).optimizer - work.optimizer;
  return {row.tp,
          row.pp,
          row.vpp,
          row.ep,
          row.dp,
          row.mbs,
          row.grad_accum,
          row.recompute,
          name_of(pipeline_shape_of(row).kind),
          layer_seconds(work.layer, params.factors),
          head_seconds(work, params.factors),
          work.mean_layers,
          work.stage_layers,
          work.last_stage_layers,
          all_bytes(exchanges.tp, exchanges.tp_left),
          bytes(exchanges.tp),
          all_bytes(exchanges.ep, exchanges.ep_left),
          bytes(exchanges.ep),
          row.ep * row.tp > gpu.host_gpus,
          bytes(exchanges.stages),
          rings[0].elements,
          rings[0].adapters,
          rings[1].elements,
          rings[1].adapters,
          exchanges.gradients.elements,
          exchanges.weights.codings,
          optimizer * residual,
          work.bubble,
          work.window_microbatches,
          work.octaves,
          variants};
}

// Names of row_json's values.
constexpr std::array kColumns{"tp",
                              "pp",
                              "vpp",
                              "ep",
                              "dp",
                              "mbs",
                              "m",
                              "recompute",
                              "schedule",
                              "layer_s",
                              "head_s",
                              "mean_layers",
                              "stage_layers",
                              "last_stage_layers",
                              "tp_bytes",
                              "tp_coded",
                              "ep_bytes",
                              "ep_coded",
                              "ep_network",
                              "pp_bytes",
                              "dense",
                              "dense_adapters",
                              "experts",
                              "expert_adapters",
                              "sent_weights",
                              "weight_codings",
                              "residual_s",
                              "bubble",
                              "window",
                              "octaves",
                              "variants"};

/// Rows of a world, the fastest ones if there are too many.
Json world_json(const LayoutSearch& search, const WhatIfParams& params, double gpus,
                const CanRun& can_run) {
  const GpuSpec& gpu = search.gpu();
  const double tp_sums = formatted_sums(search.model());
  std::vector<WhatIfRow> entries;
  for (const RunRow& row : search.rows(gpus)) {
    const StepWork work = work_of(row, gpu);
    WhatIfRow entry{row, work, exchanges_of(row, gpu, work, tp_sums),
                    searched_stages(row, search.model(), search.sync())};
    for (const int zero : entry.stages) {
      if (peak_bytes(row, zero) > params.limits.memory_share * gpu.memory_bytes) continue;
      const double seconds = step_time(staged_work(entry, gpu, zero), params.factors).total;
      entry.seconds = std::min(entry.seconds, seconds);
    }
    entries.push_back(std::move(entry));
  }
  const size_t divided = entries.size();
  if (entries.size() > params.max_rows) {
    std::ranges::stable_sort(entries, {}, &WhatIfRow::seconds);
    entries.resize(params.max_rows);
  }
  Json rows = Json::array();
  for (WhatIfRow& entry : entries) {
    std::erase_if(entry.stages, [&](int zero) {
      return !can_run({entry.row, {zero, {}}, 0, {}, 0});
    });
    if (!entry.stages.empty()) rows.push_back(row_json(entry, gpu, params));
  }
  return {{"gpus", gpus}, {"divided", divided}, {"considered", entries.size()}, {"rows", rows}};
}

/// Formats that the page chooses among for gradients and weights.
std::vector<Wire> dp_formats(const WhatIfParams& params) {
  return params.limits.dp_formats ? searched_formats(true) : std::vector<Wire>{Wire{}};
}

/// Texts of parallel.codec, indexed by the formats of TP sums, experts, stages, gradients and
/// weights.
Json codecs_json(const ModelConfig& model, const WhatIfParams& params) {
  const std::vector<Wire> formats = searched_formats(false), of_dp = dp_formats(params);
  Json texts = Json::array();
  CodecPolicy codec;
  for (const Wire& tp : formats) {
    codec.attention = tp;
    if (formatted_sums(model) > 1) codec.mlp = tp;
    for (const Wire& experts : formats) {
      codec.experts = experts;
      for (const Wire& stages : formats) {
        codec.stages = stages;
        for (const Wire& gradients : of_dp) {
          codec.gradients = gradients;
          for (const Wire& weights : of_dp) {
            codec.weights = weights;
            texts.push_back(codec.describe());
          }
        }
      }
    }
  }
  return texts;
}

Json formats_json(const GpuSpec& gpu) {
  Json formats = Json::array();
  for (const Wire& wire : searched_formats(false)) {
    formats.push_back({{"name", wire.describe()},
                       {"bytes", bytes_per_element(wire, kValueBytes)},
                       {"rate", codec_rate(wire, gpu)},
                       {"error", wire.is_exact() ? 0 : wire.error_bound()}});
  }
  return formats;
}

Json dp_formats_json(const GpuSpec& gpu, const WhatIfParams& params) {
  constexpr double kGradientBytes = 4;
  Json formats = Json::array();
  for (const Wire& wire : dp_formats(params)) {
    formats.push_back({{"name", wire.describe()},
                       {"gradient_bytes", bytes_per_element(wire, kGradientBytes)},
                       {"weight_bytes", bytes_per_element(wire, kValueBytes)},
                       {"rate", codec_rate(wire, gpu)},
                       {"error", wire.is_exact() ? 0 : wire.error_bound()}});
  }
  return formats;
}

Json factors_json(const Factors& factors) {
  Json json;
  for (const Term term : {Term::tp, Term::ep, Term::pp, Term::bubble, Term::dp, Term::window,
                          Term::imbalance, Term::jitter, Term::software}) {
    json[term_priors()[size_t(term)].name] = factors[size_t(term)];
  }
  json["fixed"] = fixed_seconds(factors);
  return json;
}

}  // namespace

std::string what_if_page(const LayoutSearch& search, const WhatIfParams& params,
                         const CanRun& can_run) {
  const GpuSpec& gpu = search.gpu();
  Json worlds = Json::array();
  for (const double times : {.25, .5, 1.0, 2.0, 4.0}) {
    const double gpus = params.gpus * times;
    if (gpus != std::floor(gpus)) continue;
    Json world = world_json(search, params, gpus, can_run);
    if (!world["rows"].empty())
      worlds.push_back(std::move(world));
    else if (times == 1)
      throw InvalidArgument(fmt::format("{:g} GPUs: no layout that can run divides the job", gpus));
  }
  const Json data{{"job", params.name},
                  {"gpus", params.gpus},
                  {"gpu", gpu.name},
                  {"gpus_per_host", gpu.host_gpus},
                  {"host", gpu.nvlink_rate / kRateUnit},
                  {"network", gpu.nic_rate / kRateUnit},
                  {"memory_gib", gpu.memory_bytes / kGiB},
                  {"memory_share", params.limits.memory_share},
                  {"max_error", params.limits.max_error},
                  {"formats", formats_json(gpu)},
                  {"dp_formats", dp_formats_json(gpu, params)},
                  {"codecs", codecs_json(search.model(), params)},
                  {"factors", factors_json(params.factors)},
                  {"columns", kColumns},
                  {"worlds", worlds}};
  std::string text = dump_json(data);
  for (size_t at = 0; (at = text.find('<', at)) != std::string::npos;)
    text.replace(at, 1, "\\u003c");
  const std::string head = page_head("Tandem plan", kWhatIfStyle);
  const std::vector<PageMark> marks{
      {"@HEAD@", head},          {"@DATA@", text},          {"@CHARTJS@", kPageChartJs},
      {"@COMMON@", kPageCommon}, {"@MODEL@", kWhatIfModel}, {"@SCRIPT@", kWhatIfScript}};
  return fill_page(kWhatIfHtml, marks);
}

}  // namespace tandem::plan
