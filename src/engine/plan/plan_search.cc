#include "engine/plan/plan_search.h"

#include <fmt/format.h>

#include <array>
#include <cmath>
#include <nlohmann/json.hpp>
#include <optional>
#include <utility>
#include <vector>

#include "core/system/files.h"
#include "core/system/json.h"
#include "core/system/output.h"
#include "core/system/printable.h"
#include "engine/config/config.h"
#include "engine/config/gpu_training.h"
#include "engine/plan/chakra.h"
#include "engine/plan/cost/rank_state.h"
#include "engine/plan/fit/published_runs.h"
#include "engine/plan/hardware_file.h"
#include "engine/plan/layout_search.h"
#include "engine/plan/plan_answer.h"
#include "engine/plan/plan_target.h"
#include "engine/plan/what_if.h"
#include "tandem/error.h"

namespace tandem {
namespace {

using Json = nlohmann::ordered_json;
using plan::Layout;

constexpr size_t kShown = 10, kShownContext = 3, kMaxTried = 1000;

std::vector<plan::RunRow> read_runs(const std::string& path) {
  std::vector<plan::RunRow> rows =
      path.empty() ? plan::parse_rows(kPublishedRuns, "bench/published/runs.csv")
                   : plan::read_rows(path);
  std::erase_if(rows, [](const plan::RunRow& run) { return !plan::find_gpu(run.gpu); });
  return rows;
}

/// Factors of the fit to runs of this kind of GPU.
plan::FactorsOf fitted_factors(const std::vector<plan::RunRow>& runs, int64_t experts,
                               const plan::GpuSpec& gpu) {
  plan::RunRow row;
  row.id = "job";
  row.gpu = gpu.name;
  row.precision = "bf16";
  row.experts = double(experts);
  const plan::RunRow* predicted = &row;
  const plan::Factors factors =
      plan::Calibration(runs, {&predicted, 1}).fit_of(row).factors(row, gpu);
  return [factors](const plan::RunRow&) { return factors; };
}

/// Throws ConfigError if the engine cannot run the layout.
TrainConfig runnable_config(const plan::LayoutSearch& search, const Layout& layout, bool on_gpus) {
  TrainConfig config = search.config_in(layout);
  if (on_gpus) check_gpu_training(config, false);
  return config;
}

/// First layout that the engine can run, moved to the front; nothing if there is none.
std::optional<TrainConfig> first_runnable_config(const plan::LayoutSearch& search,
                                                 std::vector<Layout>& layouts, bool on_gpus,
                                                 std::string& reason) {
  for (size_t i = 0; i < std::min(layouts.size(), kMaxTried); ++i) {
    try {
      TrainConfig config = runnable_config(search, layouts[i], on_gpus);
      layouts.erase(layouts.begin(), layouts.begin() + std::ptrdiff_t(i));
      return config;
    } catch (const ConfigError& error) {
      if (reason.empty()) reason = error.what();
    }
  }
  return std::nullopt;
}

std::string layout_text(const Layout& layout) {
  const plan::RunRow& row = layout.row;
  return fmt::format("{:g} | {:g} | {:g} | {} | {:g} | {:g} | {:g} | {} | {:g} | {:g} | {} | {}",
                     row.tp, row.cp, row.pp, name_of(plan::pipeline_shape_of(row).kind), row.vpp,
                     row.ep, row.dp, layout.formats.zero, row.mbs, row.grad_accum, row.recompute,
                     layout.formats.codec.describe());
}

std::string table(const std::vector<Layout>& layouts, const Layout& best) {
  std::string text =
      "| tp | cp | pp | schedule | stages per rank | ep | dp | zero | microbatch | microbatches | "
      "recompute | wire "
      "formats | error, % | step, s | memory, GiB | slower by |\n"
      "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- "
      "| --- |\n";
  for (const Layout& layout : layouts) {
    text += fmt::format("| {} | {:.2g} | {:.4g} | {:.1f} | {} |\n", layout_text(layout),
                        100 * layout.error, layout.time.total, layout.memory_gib,
                        plan::reasons_to_lose(layout, best));
  }
  return text;
}

/// Exchanges of the fastest layout. dp of a layout is that of one learner.
std::string describe_exchange(const SyncConfig& sync, const Layout& best, double gpus) {
  const plan::LearnerExchange& exchange = best.exchange;
  return fmt::format(
      "\n{} learners of {:g} GPUs each. Exchange of the fastest layout, every {} steps in {} "
      "fragments, applied {} steps later:\n\n"
      "| sent by a rank for a fragment, MB | a step, MB | on the link, s | exposed a step, s | "
      "memory, GiB |\n| --- | --- | --- | --- | --- |\n"
      "| {:.4g} | {:.4g} | {:.4g} | {:.4g} | {:.2f} |\n",
      sync.num_learners(), gpus, sync.period(), sync.num_fragments(), sync.delay,
      exchange.sent_bytes / 1e6, exchange.step_bytes / 1e6, exchange.seconds,
      best.time.exposed_sync, exchange.memory_bytes / plan::kGiB);
}

Json to_json(const Layout& layout, const Layout& best) {
  const plan::RunRow& row = layout.row;
  Json terms;
  for (const auto& [name, seconds] : plan::terms_of(layout.time)) terms[name] = seconds;
  return {{"tp", row.tp},
          {"cp", row.cp},
          {"pp", row.pp},
          {"schedule", name_of(plan::pipeline_shape_of(row).kind)},
          {"virtual_stages", row.vpp},
          {"ep", row.ep},
          {"dp", row.dp},
          {"zero", layout.formats.zero},
          {"microbatch", row.mbs},
          {"microbatches", row.grad_accum},
          {"recompute", row.recompute},
          {"codec", layout.formats.codec.describe()},
          {"error", layout.error},
          {"predicted_s", layout.time.total},
          {"predicted_memory_gib", layout.memory_gib},
          {"terms_s", terms},
          {"exchange",
           {{"sent_bytes", layout.exchange.sent_bytes},
            {"seconds", layout.exchange.seconds},
            {"exposed_s", layout.time.exposed_sync},
            {"memory_gib", layout.exchange.memory_bytes / plan::kGiB}}},
          {"sent_bytes", {{"sync", layout.exchange.step_bytes}}},
          {"slower_by", plan::reasons_to_lose(layout, best)}};
}

Json to_json(const plan::PlanAnswer& answer) {
  const plan::AnswerParams& params = answer.params;
  Json json{{"model", params.name},
            {"gpus", params.gpus},
            {"gpu", answer.gpu},
            {"tokens_per_s", answer.tokens_per_s},
            {"mfu", answer.mfu},
            {"flops_per_token", answer.flops_per_token},
            {"peak_flops", answer.peak_flops},
            {"step_s", answer.step_s},
            {"step_tokens", answer.step_tokens},
            {"memory_gib", answer.memory_gib},
            {"untested", answer.untested}};
  json["error_share"] = answer.bar ? Json(answer.bar->share) : Json();
  json["error_runs"] = answer.bar ? Json(answer.bar->runs) : Json();
  json["error_of"] = answer.bar ? Json(answer.bar->of) : Json();
  json["tokens"] = params.tokens > 0 ? Json(params.tokens) : Json();
  json["days"] = params.tokens > 0 ? Json(answer.days) : Json();
  json["cost"] = params.tokens > 0 && params.price > 0 ? Json(answer.cost) : Json();
  return json;
}

Json to_json(const std::vector<Layout>& layouts, const Layout& best) {
  Json json = Json::array();
  for (const Layout& layout : layouts) json.push_back(to_json(layout, best));
  return json;
}

std::vector<Layout> first(const std::vector<Layout>& layouts, size_t count) {
  return {layouts.begin(), layouts.begin() + std::ptrdiff_t(std::min(layouts.size(), count))};
}

double parse_accuracy_option(const std::string& text) {
  try {
    return plan::parse_accuracy(text);
  } catch (const InvalidArgument& error) {
    throw InvalidArgument(fmt::format("--accuracy {}: {}", printable(text), error.what()));
  }
}

void write_page(const PlanSearchOptions& options, const std::string& name,
                const plan::LayoutSearch& search, const plan::FactorsOf& factors,
                double max_error) {
  const auto can_run = [&](const Layout& layout) {
    try {
      runnable_config(search, layout, !options.dp_formats);
      return true;
    } catch (const ConfigError&) {
      return false;
    }
  };
  const plan::WhatIfParams params{
      .name = single_line(name),
      .gpus = options.gpus,
      .factors = factors({}),
      .limits = {.max_error = max_error, .dp_formats = options.dp_formats}};
  write_output(options.page, plan::what_if_page(search, params, can_run));
}

/// Returns the number of traces.
size_t write_traces(const PlanSearchOptions& options, const plan::ChakraParams& params) {
  const std::vector<int> ranks = plan::chakra_ranks(params.layout.row);
  make_directories(options.chakra);
  for (const int rank : ranks) {
    write_output(fmt::format("{}/tandem.{}.et", options.chakra, rank),
                 plan::chakra_trace(params, rank));
  }
  write_output(options.chakra + "/groups.json", plan::chakra_groups(params.layout.row, ranks));
  return ranks.size();
}

/// Throws InvalidArgument if two results are to be written to the same file.
void check_outputs(const PlanSearchOptions& options) {
  const std::array<std::pair<const char*, std::string>, 3> files{
      {{"--out", options.out}, {"--json", options.json}, {"--page", options.page}}};
  for (size_t i = 0; i < files.size(); ++i) {
    for (size_t j = i + 1; j < files.size(); ++j) {
      const auto& [option, path] = files[i];
      if (path.empty() || path != files[j].second) continue;
      throw InvalidArgument(fmt::format("{} and {}: both {}: expected two files", option,
                                        files[j].first, printable(path)));
    }
  }
}

/// GPUs of a learner. Throws InvalidArgument for learners that do not divide them, and for files
/// that do not describe learners.
double learner_gpus(const PlanSearchOptions& options, const SyncConfig& sync) {
  const int64_t learners = sync.num_learners();
  if (learners == 1) return options.gpus;
  for (const auto& [option, path] :
       {std::pair("--page", options.page), std::pair("--chakra", options.chakra)}) {
    if (path.empty()) continue;
    throw InvalidArgument(
        fmt::format("{} with sync.learners = {}: expected a job of one learner", option, learners));
  }
  if (std::fmod(options.gpus, double(learners)) != 0) {
    throw InvalidArgument(fmt::format("--gpus {:g}: expected a multiple of sync.learners = {}",
                                      options.gpus, learners));
  }
  return options.gpus / double(learners);
}

/// Throws InvalidArgument for results that context-parallel layouts do not have.
void check_context(const PlanSearchOptions& options, const ParallelConfig& parallel) {
  if (options.max_cp == 1) return;
  for (const auto& [option, is_given] :
       {std::pair("--page", !options.page.empty()), std::pair("--chakra", !options.chakra.empty()),
        std::pair("sync.learners", parallel.sync.num_learners() > 1)}) {
    if (!is_given) continue;
    throw InvalidArgument(fmt::format("{} with cp of up to {}: expected {} = 1", option,
                                      options.max_cp,
                                      parallel.cp == options.max_cp ? "parallel.cp" : "--max-cp"));
  }
}

/// Layouts that fit, the fastest first; the engine need not run them all. Throws InvalidArgument if
/// none fits.
plan::FoundLayouts find_layouts(const PlanSearchOptions& options, const plan::LayoutSearch& search,
                                double gpus, const plan::FactorsOf& factors, double max_error) {
  plan::FoundLayouts found = search.find(
      gpus, factors,
      {.max_error = max_error, .dp_formats = options.dp_formats, .max_cp = double(options.max_cp)});
  if (!found.fitting.empty()) return found;
  const Layout& smallest = found.smallest;
  const std::string cp =
      smallest.row.cp > 1 ? fmt::format(", cp {:g}", smallest.row.cp) : std::string();
  throw InvalidArgument(fmt::format(
      "{}: no layout fits {:g} GPUs: the smallest needs {:.1f} GiB a rank (tp {:g}{}, pp {:g}), "
      "expected at most 92 % of {:.1f}",
      printable(options.subject), gpus, smallest.memory_gib, smallest.row.tp, cp, smallest.row.pp,
      search.gpu().memory_bytes / plan::kGiB));
}

/// Takes the layouts that training cannot run on GPUs out of those that fit: with context
/// parallelism. Throws InvalidArgument if no other is left.
std::vector<Layout> take_context_layouts(const PlanSearchOptions& options,
                                         plan::FoundLayouts& found) {
  std::vector<Layout> taken;
  if (options.dp_formats) return taken;  // a job for CPU ranks
  for (const Layout& layout : found.fitting) {
    if (layout.row.cp > 1) taken.push_back(layout);
  }
  std::erase_if(found.fitting, [](const Layout& layout) { return layout.row.cp > 1; });
  if (!found.fitting.empty()) return taken;
  throw InvalidArgument(fmt::format(
      "{}: no layout fits {:g} GPUs without context parallelism, which training has on CPU ranks "
      "only: the fastest would be tp {:g}, cp {:g}, pp {:g} with {:.1f} GiB a rank",
      printable(options.subject), options.gpus, taken[0].row.tp, taken[0].row.cp, taken[0].row.pp,
      taken[0].memory_gib));
}

/// Result of a search.
struct Plan {
  plan::PlanTarget target;
  plan::FoundLayouts found;
  plan::PlanAnswer answer;
  std::vector<Layout> fastest, front;
  std::vector<Layout> not_on_gpus;  ///< the fastest with context parallelism
  size_t traces = 0;
  double learner_gpus = 0;

  const Layout& best() const { return found.fitting.front(); }
};

void write_plan_json(const std::string& path, const Plan& plan) {
  const Layout& best = plan.best();
  const Json json{{"answer", to_json(plan.answer)},
                  {"considered", plan.found.considered},
                  {"fitting", plan.found.num_fitting},
                  {"best", to_json(best, best)},
                  {"fastest", to_json(plan.fastest, best)},
                  {"pareto", to_json(plan.front, best)},
                  {"not_on_gpus", to_json(plan.not_on_gpus, best)}};
  const std::string text = dump_json(json, 1) + "\n";
  path == "-" ? fmt::print("{}", text) : write_output(path, text);
}

void print_plan(const PlanSearchOptions& options, const Plan& plan) {
  const SyncConfig& sync = plan.target.config.parallel.sync;
  fmt::print("{}\nThe fastest of {} layouts, of which {} fit{}{}:\n\n{}", describe(plan.answer),
             plan.found.considered, plan.found.num_fitting,
             plan.not_on_gpus.empty() ? "" : ", those with context parallelism among them",
             options.all ? "" : " (--all: the best in memory and error, too)",
             table(plan.fastest, plan.best()));
  if (options.all) {
    fmt::print("\nBest in step time, memory or error:\n\n{}", table(plan.front, plan.best()));
  }
  if (!plan.not_on_gpus.empty()) {
    fmt::print(
        "\nWith context parallelism, which training has on CPU ranks only; no GPU runs these "
        "yet:\n\n{}",
        table(plan.not_on_gpus, plan.best()));
  }
  if (sync.num_learners() > 1) {
    fmt::print("{}", describe_exchange(sync, plan.best(), plan.learner_gpus));
  }
  if (options.dp_formats) fmt::print("\nWith --dp-formats the job is one for CPU ranks.\n");
  if (!options.chakra.empty()) {
    fmt::print("\nWrote traces of {} of {:g} ranks to {}\n", plan.traces, options.gpus,
               single_line(options.chakra));
  }
  if (!options.out.empty()) {
    fmt::print("\nWrote {}{}\n", single_line(options.out),
               plan.target.config.data.paths.empty() ? ", whose data.paths is to be set" : "");
  }
  if (!options.page.empty()) fmt::print("\nWrote {}\n", single_line(options.page));
}

}  // namespace

void plan_layout(const PlanSearchOptions& asked) {
  PlanSearchOptions options = asked;
  check_outputs(options);
  const plan::GpuSpec gpu = plan::read_hardware(options.hardware);
  Plan plan;
  plan.target = plan::read_target({.subject = options.subject,
                                   .init = options.init,
                                   .gpus = options.gpus,
                                   .seq = options.seq,
                                   .batch = options.batch,
                                   .tokens = int64_t(options.tokens)});
  const auto& base = plan.target.config;
  options.max_cp = std::max(options.max_cp, base.parallel.cp);
  check_context(options, base.parallel);
  plan.learner_gpus = learner_gpus(options, base.parallel.sync);
  const std::vector<plan::RunRow> runs = read_runs(options.fit);
  const plan::FactorsOf factors = fitted_factors(runs, base.model.experts, gpu);
  const double max_error = parse_accuracy_option(options.accuracy);
  const plan::LayoutSearch search(base, gpu);
  plan.found = find_layouts(options, search, plan.learner_gpus, factors, max_error);
  plan.not_on_gpus = first(take_context_layouts(options, plan.found), kShownContext);
  std::string reason;
  const auto config =
      first_runnable_config(search, plan.found.fitting, !options.dp_formats, reason);
  if (!config) throw InvalidArgument(fmt::format("no layout can run: {}", reason));
  plan.fastest = first(plan.found.fitting, kShown);
  plan.front = plan::pareto_front(plan.found.fitting);
  plan.answer = make_answer({.name = plan.target.name,
                             .gpus = options.gpus,
                             .learners = double(base.parallel.sync.num_learners()),
                             .tokens = double(base.train.tokens),
                             .price = options.price},
                            plan.best(), gpu, runs);
  if (!options.out.empty())
    write_output(options.out, config->to_toml(differing_keys(plan.target.base, *config)));
  if (!options.page.empty()) write_page(options, plan.target.name, search, factors, max_error);
  if (!options.chakra.empty()) {
    plan.traces = write_traces(
        options, {plan.best(), gpu, factors(plan.best().row), plan::formatted_sums(base.model)});
  }
  if (!options.json.empty()) write_plan_json(options.json, plan);
  if (options.json != "-") print_plan(options, plan);
}

}  // namespace tandem
