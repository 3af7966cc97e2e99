#include "engine/plan/layout_search.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <iterator>
#include <tuple>

#include "engine/plan/cost/rank_state.h"
#include "tandem/error.h"

namespace tandem::plan {
namespace {

bool divides(double divisor, double number) {
  return std::fmod(number, divisor) == 0;
}

/// Divisors of `number` that are at most `bound`.
std::vector<double> divisors(double number, double bound) {
  std::vector<double> found;
  for (double d = 1; d <= std::min(number, bound); ++d) {
    if (divides(d, number)) found.push_back(d);
  }
  return found;
}

/// Calls `use` for every schedule of the row's stages, set in the row.
template <class Use>
void for_each_schedule(RunRow& row, const Use& use) {
  using schedule::PipelineKind;
  row.schedule = PipelineKind::one_f_one_b;
  for (const double vpp : divisors(row.layers / row.pp, row.pp > 1 ? row.layers : 1)) {
    if (vpp > 1 && !divides(row.pp, row.grad_accum)) continue;
    row.vpp = vpp;
    use();
  }
  if (row.pp == 1 || row.grad_accum < 2 * row.pp) return;
  for (const PipelineKind kind :
       {PipelineKind::zb_h1, PipelineKind::zb_v, PipelineKind::dualpipe_v}) {
    row.schedule = kind, row.vpp = min_chunks(kind);
    if (divides(row.pp * row.vpp, row.layers)) use();
  }
}

/// Calls `use` for every layout that divides the job.
template <class Use>
void for_each_layout(RunRow row, double max_cp, const GpuSpec& gpu, const Use& use) {
  constexpr double kMaxMicrobatch = 16;
  const auto use_groups = [&](double tp, double cp, double pp) {
    if (!divides(tp * cp * pp, row.gpus)) return;
    row.tp = tp, row.cp = cp, row.pp = pp, row.dp = row.gpus / tp / cp / pp;
    if (!divides(row.dp, row.gbs)) return;
    for (const double ep : divisors(std::max(row.experts, 1.0), row.dp)) {
      if (!divides(ep, row.dp)) continue;
      row.ep = ep;
      for (const double mbs : divisors(row.gbs / row.dp, kMaxMicrobatch)) {
        row.mbs = mbs, row.grad_accum = row.gbs / row.dp / mbs;
        for_each_schedule(row, [&] {
          for (const char* recompute : {"none", "full"}) {
            row.recompute = recompute;
            use(row);
          }
        });
      }
    }
  };
  for (const double tp : divisors(row.kv_heads, gpu.host_gpus)) {
    if (!divides(tp, row.gpus) || !divides(tp, row.ffn)) continue;
    // Each rank has the head and tail chunk of a sequence.
    for (const double cp : divisors(row.gpus / tp, std::min(max_cp, row.seq / 2))) {
      for (const double pp : divisors(row.layers, row.gpus / tp / cp)) use_groups(tp, cp, pp);
    }
  }
}

/// Candidates for a site: the fastest exact one, and the fastest whose error is at most a bound.
class SiteFormats {
 public:
  SiteFormats(const Exchange& exchange, bool of_dp, const GpuSpec& gpu) {
    for (const Wire& wire : searched_formats(of_dp))
      candidates_.push_back({wire, encoded_seconds(exchange, wire, gpu)});
  }
  Wire fastest(double max_error) const {
    return best(
        [&](const Wire& wire) { return wire.is_exact() || wire.error_bound() <= max_error; });
  }
  /// No format, and those that save time: the fastest exact and the fastest lossy one.
  std::vector<Wire> alternatives(double max_error) const {
    std::vector<Wire> found{Wire{}};
    for (const Wire& wire :
         {best([](const Wire& w) { return w.is_exact(); }), fastest(max_error)}) {
      if (std::ranges::find(found, wire) == found.end()) found.push_back(wire);
    }
    return found;
  }

 private:
  template <class Allowed>
  Wire best(const Allowed& allowed) const {
    const Candidate* found = &candidates_.front();
    for (const Candidate& candidate : candidates_) {
      if (allowed(candidate.wire) && candidate.seconds < found->seconds) found = &candidate;
    }
    return found->wire;
  }

  struct Candidate {
    Wire wire;
    double seconds;
  };
  std::vector<Candidate> candidates_;
};

/// Error bounds of the formats that a limit allows, 0 first.
std::vector<double> error_levels(double max_error) {
  std::vector<double> levels{0};
  for (const Wire& wire : searched_formats(false)) {
    if (!wire.is_exact() && wire.error_bound() <= max_error) levels.push_back(wire.error_bound());
  }
  return levels;
}

bool is_as_good(const Layout& a, const Layout& b) {
  return a.time.total <= b.time.total && a.memory_gib <= b.memory_gib && a.error <= b.error;
}

/// Search over the formats of one row after another.
class FormatSearch {
 public:
  FormatSearch(const ModelConfig& model, const SyncConfig& sync, const GpuSpec& gpu,
               const FactorsOf& factors, const LayoutLimits& limits, FoundLayouts& result)
      : model_(model),
        sync_(sync),
        tp_sums_(formatted_sums(model)),
        learners_(model, sync),
        gpu_(gpu),
        factors_(factors),
        limits_(limits),
        levels_(error_levels(limits.max_error)),
        result_(result) {}

  void add(const RunRow& row) {
    const StepWork work = work_of(row, gpu_);
    const LayoutExchanges exchanges = exchanges_of(row, gpu_, work, tp_sums_);
    const Factors factors = factors_(row);
    const LearnerExchange exchange = learners_.of(row, gpu_);
    const double working = working_bytes(row) + exchange.memory_bytes;
    std::vector<Layout> best;
    for (const LayoutFormats& formats : all_formats(row, exchanges)) {
      const double bytes = working + state_bytes(row, formats);
      Layout layout{row, formats, error_of(formats.codec), {}, bytes / kGiB, exchange};
      if (result_.considered++ == 0 || layout.memory_gib < result_.smallest.memory_gib)
        result_.smallest = layout;
      if (bytes > limits_.memory_share * gpu_.memory_bytes) continue;
      ++result_.num_fitting;
      StepTime& time = layout.time;
      time = step_time(work_in_formats(row, gpu_, work, exchanges, formats), factors);
      time.exposed_sync = learners_.exposed_seconds(exchange, time.total);
      time.total += time.exposed_sync;
      if (std::ranges::any_of(best, [&](const Layout& b) { return is_as_good(b, layout); }))
        continue;
      std::erase_if(best, [&](const Layout& other) { return is_as_good(layout, other); });
      best.push_back(std::move(layout));
    }
    std::ranges::move(best, std::back_inserter(result_.fitting));
  }

 private:
  std::vector<LayoutFormats> all_formats(const RunRow& row, const LayoutExchanges& all) const {
    const SiteFormats tp(all.tp, false, gpu_), ep(all.ep, false, gpu_), pp(all.stages, false, gpu_),
        gradients(all.gradients, true, gpu_), weights(all.weights, true, gpu_);
    const std::vector<int> stages = searched_stages(row, model_, sync_);
    std::vector<LayoutFormats> found;
    for (const double error : levels_) {
      CodecPolicy codec;
      if (row.tp > 1) codec.attention = tp.fastest(error);
      if (tp_sums_ > 1) codec.mlp = codec.attention;
      if (row.ep > 1) codec.experts = ep.fastest(error);
      if (row.pp > 1) codec.stages = pp.fastest(error);
      for (const int zero : stages) found.push_back({zero, codec});
      if (row.dp * row.cp == 1 || !limits_.dp_formats) continue;
      for (const Wire& gradient : gradients.alternatives(error)) {
        for (const Wire& weight : weights.alternatives(error)) {
          if (gradient.is_none() && weight.is_none()) continue;
          codec.gradients = gradient, codec.weights = weight;
          for (const int zero : stages) {
            if (zero > 0) found.push_back({zero, codec});
          }
        }
      }
    }
    return found;
  }

  const ModelConfig& model_;
  const SyncConfig& sync_;
  const double tp_sums_;
  const LearnerExchanges learners_;
  const GpuSpec& gpu_;
  const FactorsOf& factors_;
  const LayoutLimits& limits_;
  const std::vector<double> levels_;
  FoundLayouts& result_;
};

}  // namespace

std::array<NamedSeconds, 12> terms_of(const StepTime& time) {
  return {{{"compute", time.compute},
           {"tp", time.exposed_tp},
           {"cp", time.exposed_cp},
           {"ep", time.exposed_ep},
           {"pp", time.exposed_pp},
           {"dp", time.exposed_dp},
           {"sync", time.exposed_sync},
           {"imbalance", time.imbalance},
           {"bubble", time.bubble},
           {"optimizer", time.optimizer},
           {"fixed", time.fixed},
           {"jitter", time.jitter}}};
}

RunRow LayoutSearch::row_without_layout(double gpus) const {
  RunRow row;
  const ModelConfig& model = config_.model;
  row.id = row.model = "job";
  row.gpu = gpu_.name;
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
  row.of_engine = true;
  row.tied_embeddings = model.tie_word_embeddings;
  row.moe_layer_share = 1 / double(model.moe_layer_freq);
  if (model.experts > 0)
    row.shared_experts = double(model.shared_ffn) / double(model.ffn_per_expert());
  row.seq = double(config_.train.seq);
  row.gbs = double(config_.train.batch) / double(config_.parallel.sync.num_learners());
  row.gpus = gpus;
  row.sharding = "ZeRO-1";
  return row;
}

std::vector<RunRow> LayoutSearch::rows(double gpus, double max_cp) const {
  std::vector<RunRow> rows;
  for_each_layout(row_without_layout(gpus), max_cp, gpu_,
                  [&](const RunRow& row) { rows.push_back(row); });
  return rows;
}

std::vector<int> searched_stages(const RunRow& row, const ModelConfig& model,
                                 const SyncConfig& sync) {
  std::vector<int> stages{1};
  if (row.dp * row.cp == 1) return stages;
  if (sync.num_learners() == 1) stages.push_back(0);
  const bool is_whole = row.pp > 1 && (model.tie_word_embeddings || splits_backward(row.schedule));
  if (!is_whole && !sync.is_demo()) stages.push_back(2);
  return stages;
}

double formatted_sums(const ModelConfig& model) {
  const double experts = double(model.moe_layers()) / double(std::max<int64_t>(1, model.layers));
  return 2 - (model.shared_ffn > 0 ? 0 : experts);
}

std::vector<Wire> searched_formats(bool of_dp) {
  std::vector<Wire> formats{Wire{}};
  if (of_dp) formats.push_back({.codec = Codec::lossless});  // GPU ranks take no other site's
  for (const Codec codec : {Codec::int8, Codec::int6, Codec::int4})
    formats.push_back({.codec = codec});
  return formats;
}

FoundLayouts LayoutSearch::find(double gpus, const FactorsOf& factors,
                                const LayoutLimits& limits) const {
  FoundLayouts found;
  FormatSearch formats(config_.model, config_.parallel.sync, gpu_, factors, limits, found);
  for_each_layout(row_without_layout(gpus), limits.max_cp, gpu_,
                  [&](const RunRow& row) { formats.add(row); });
  if (found.considered == 0) {
    throw InvalidArgument(fmt::format(
        "--gpus {:g}: no layout of {} layers, {} key heads and a batch of {:g}: expected GPUs = tp "
        "x "
        "pp x dp, where tp divides the heads, pp the layers and dp the batch",
        gpus, config_.model.layers, config_.model.kv_heads, row_without_layout(gpus).gbs));
  }
  std::ranges::stable_sort(found.fitting, {}, [](const Layout& layout) {
    return std::tuple(layout.time.total, layout.memory_gib, layout.error);
  });
  return found;
}

TrainConfig LayoutSearch::config_in(const Layout& layout) const {
  TrainConfig config = config_;
  const RunRow& row = layout.row;
  config.train.dtype = "bf16";
  config.train.microbatch = int64_t(row.mbs);
  config.train.recompute = row.recompute == "full" ? "full" : "none";
  config.parallel.tp = int64_t(row.tp);
  config.parallel.cp = int64_t(row.cp);
  config.parallel.pp = int64_t(row.pp);
  config.parallel.dp = int64_t(row.dp) * config.parallel.sync.num_learners();
  config.parallel.ep = int64_t(row.ep);
  config.parallel.zero = layout.formats.zero;
  config.parallel.codec = layout.formats.codec.describe();
  config.parallel.replicas = config.parallel.dp_shard = config.parallel.dp_host = 0;
  config.parallel.virtual_stages = int64_t(row.vpp);
  config.parallel.schedule = name_of(pipeline_shape_of(row).kind);
  config.parallel.layers_per_stage.clear();
  return parse_config(config.to_toml(), "planned job");
}

std::vector<Layout> pareto_front(const std::vector<Layout>& fastest_first) {
  std::vector<Layout> front;
  for (const Layout& layout : fastest_first) {
    if (std::ranges::none_of(front, [&](const Layout& b) { return is_as_good(b, layout); }))
      front.push_back(layout);
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
