#include "engine/plan/layout_search.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>

#include "engine/plan/rank_state.h"
#include "tandem/error.h"

namespace tandem::plan {
namespace {

bool divides(double divisor, double number) {
  return std::fmod(number, divisor) == 0;
}

/// Row of the job without a layout.
RunRow make_row(const TrainConfig& base, double gpus, const GpuSpec& gpu) {
  RunRow row;
  const ModelConfig& model = base.model;
  row.id = row.model = "job";
  row.gpu = gpu.name;
  row.precision = "bf16";
  row.layers = double(model.layers);
  row.hidden = double(model.hidden);
  row.heads = double(model.heads);
  row.kv_heads = double(model.kv_heads);
  row.head_dim = double(model.head_dim);
  row.ffn = double(model.experts > 0 ? model.ffn_per_expert() : model.ffn);
  row.vocab = double(model.vocab);
  row.gated = true;
  row.experts = double(model.experts);
  row.top_k = double(model.top_k);
  row.moe_layer_share = 1 / double(model.moe_layer_freq);
  if (model.experts > 0)
    row.shared_experts = double(model.shared_ffn) / double(model.ffn_per_expert());
  row.seq = double(base.train.seq);
  row.gbs = double(base.train.batch);
  row.gpus = gpus;
  row.sharding = "ZeRO-1";
  return row;
}

/// Divisors of `number` that are at most `bound`.
std::vector<double> divisors(double number, double bound) {
  std::vector<double> found;
  for (double d = 1; d <= std::min(number, bound); ++d) {
    if (divides(d, number)) found.push_back(d);
  }
  return found;
}

/// Calls `use` for every layout that divides the job.
template <class Use>
void for_each_layout(RunRow row, const GpuSpec& gpu, const Use& use) {
  constexpr double kMaxMicrobatch = 16;
  for (const double tp : divisors(row.kv_heads, gpu.host_gpus)) {
    if (!divides(tp, row.gpus) || !divides(tp, row.ffn)) continue;
    for (const double pp : divisors(row.layers, row.gpus / tp)) {
      if (!divides(tp * pp, row.gpus)) continue;
      row.tp = tp, row.pp = pp, row.dp = row.gpus / tp / pp;
      if (!divides(row.dp, row.gbs)) continue;
      for (const double ep : divisors(std::max(row.experts, 1.0), row.dp)) {
        if (!divides(ep, row.dp)) continue;
        row.ep = ep;
        for (const double mbs : divisors(row.gbs / row.dp, kMaxMicrobatch)) {
          row.mbs = mbs, row.grad_accum = row.gbs / row.dp / mbs;
          for (const double vpp : divisors(row.layers / pp, pp > 1 ? row.layers : 1)) {
            if (vpp > 1 && !divides(pp, row.grad_accum)) continue;
            row.vpp = vpp;
            for (const char* recompute : {"none", "full"}) {
              row.recompute = recompute;
              use(row);
            }
          }
        }
      }
    }
  }
}

struct NamedSeconds {
  std::string_view name;
  double seconds;
};

std::array<NamedSeconds, 11> terms_of(const StepTime& time) {
  return {{{"compute", time.compute},
           {"tp", time.exposed_tp},
           {"cp", time.exposed_cp},
           {"ep", time.exposed_ep},
           {"pp", time.exposed_pp},
           {"dp", time.exposed_dp},
           {"imbalance", time.imbalance},
           {"bubble", time.bubble},
           {"optimizer", time.optimizer},
           {"fixed", time.fixed},
           {"jitter", time.jitter}}};
}

}  // namespace

LayoutSearch search_layouts(const TrainConfig& base, double gpus, const GpuSpec& gpu,
                            const FactorsOf& factors, double memory_share) {
  LayoutSearch search;
  for_each_layout(make_row(base, gpus, gpu), gpu, [&](const RunRow& row) {
    Layout layout{row, {}, peak_memory_gib(row)};
    if (search.considered++ == 0 || layout.memory_gib < search.smallest.memory_gib)
      search.smallest = layout;
    if (layout.memory_gib * kGiB > memory_share * gpu.memory_bytes) return;
    layout.time = step_time(work_of(row, gpu), factors(row));
    search.fitting.push_back(std::move(layout));
  });
  if (search.considered == 0) {
    throw InvalidArgument(fmt::format(
        "--gpus {:g}: no layout of {} layers, {} key heads and a batch of {}: expected GPUs = tp x "
        "pp x dp, where tp divides the heads, pp the layers and dp the batch",
        gpus, base.model.layers, base.model.kv_heads, base.train.batch));
  }
  std::ranges::stable_sort(search.fitting, {},
                           [](const Layout& layout) { return layout.time.total; });
  return search;
}

TrainConfig config_in_layout(const TrainConfig& base, const Layout& layout) {
  TrainConfig config = base;
  const RunRow& row = layout.row;
  config.train.dtype = "bf16";
  config.train.microbatch = int64_t(row.mbs);
  config.train.recompute = row.recompute == "full" ? "full" : "none";
  config.parallel.tp = int64_t(row.tp);
  config.parallel.pp = int64_t(row.pp);
  config.parallel.dp = int64_t(row.dp);
  config.parallel.ep = int64_t(row.ep);
  config.parallel.zero = 1;
  config.parallel.replicas = config.parallel.dp_shard = config.parallel.dp_host = 0;
  config.parallel.virtual_stages = int64_t(row.vpp);
  config.parallel.schedule = row.vpp > 1 ? "interleaved" : "1f1b";
  config.parallel.layers_per_stage.clear();
  return parse_config(to_toml(config), "planned job");
}

std::vector<Layout> pareto_front(const std::vector<Layout>& fastest_first) {
  std::vector<Layout> front;
  for (const Layout& layout : fastest_first) {
    if (front.empty() || layout.memory_gib < front.back().memory_gib) front.push_back(layout);
  }
  return front;
}

std::string reasons_to_lose(const Layout& layout, const Layout& best) {
  auto terms = terms_of(layout.time);
  const auto base = terms_of(best.time);
  for (size_t i = 0; i < terms.size(); ++i) terms[i].seconds -= base[i].seconds;
  std::ranges::stable_sort(terms, std::ranges::greater{}, &NamedSeconds::seconds);
  std::string text;
  for (size_t i = 0; i < 2; ++i) {
    if (terms[i].seconds < 1e-4) break;
    text += fmt::format("{}{} +{:.1f} ms", text.empty() ? "" : ", ", terms[i].name,
                        1e3 * terms[i].seconds);
  }
  return text;
}

}  // namespace tandem::plan
