#include <fmt/format.h>

#include <array>
#include <memory>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "cli/commands.h"
#include "cli/result_output.h"
#include "core/system/json.h"
#include "core/system/output.h"
#include "core/system/printable.h"
#include "engine/plan/schedule_picture.h"
#include "schedule/pipeline.h"
#include "schedule/pipeline_check.h"
#include "schedule/pipeline_simulation.h"
#include "tandem/error.h"

namespace tandem::cli {
namespace {

using Json = nlohmann::ordered_json;
using schedule::PipelineKind;
using schedule::PipelineShape;

constexpr int kMaxPlannedRanks = 512, kMaxMicrobatches = 4096, kMaxChunks = 64;
constexpr int64_t kMaxStagePasses = int64_t{1} << 18;
constexpr int kPictureColumns = 120;

struct ScheduleOptions {
  std::string schedule, svg;
  ResultOutput output;
  int ranks = 0, microbatches = 0;
  int chunks = 0;  ///< 0: the fewest that the schedule needs
  std::vector<double> costs{1, 1, 1};
  double transfer = 0, recompute = 0;
};

void check_options(const ScheduleOptions& options) {
  for (const double cost : options.costs) {
    if (!(cost >= 1e-6 && cost <= 1e6)) {
      throw InvalidArgument(
          fmt::format("--costs {}: expected three numbers from 1e-6 to 1e6", cost));
    }
  }
  if (options.schedule.empty() && (options.chunks != 0 || !options.svg.empty())) {
    throw InvalidArgument(fmt::format("{} without --schedule: expected both",
                                      options.svg.empty() ? "--virtual" : "--svg"));
  }
  if (!options.svg.empty() && options.svg == options.output.json) {
    throw InvalidArgument(
        fmt::format("--svg and --json: both {}: expected two files", options.svg));
  }
  const int64_t chunks = options.chunks == 0 ? 2 : options.chunks;
  const int64_t passes = chunks * options.ranks * options.microbatches;
  if (passes > kMaxStagePasses) {
    throw InvalidArgument(fmt::format(
        "plan schedule: {} microbatches on each of {} stages: expected at most {} in all",
        options.microbatches, chunks * options.ranks, kMaxStagePasses));
  }
}

PipelineShape make_shape(const ScheduleOptions& options, PipelineKind kind) {
  return {kind, options.ranks, options.microbatches,
          options.chunks == 0 ? min_chunks(kind) : options.chunks};
}

PlannedSchedule make_plan(const ScheduleOptions& options, const PipelineShape& shape) {
  PlannedSchedule plan{
      shape,
      {options.costs[0], options.costs[1], options.costs[2], options.transfer, options.recompute},
      pipeline_actions(shape),
      {}};
  const std::string violation = find_violation(shape, plan.actions);
  if (!violation.empty()) {  // an error of Tandem, not of its user
    throw std::logic_error(fmt::format("schedule {}: {}", name_of(shape.kind), violation));
  }
  plan.times = simulate(shape, plan.actions, plan.costs);
  return plan;
}

std::string percent(double share) {
  return fmt::format("{:.1f} %", 100 * share);
}

/// Activations in units of those of all layers of a rank: comparable between schedules.
double peak_per_stage(const PlannedSchedule& plan) {
  return double(plan.peak_activations()) / plan.shape.chunks;
}

std::string describe(const PlannedSchedule& plan) {
  const auto& [kind, ranks, microbatches, chunks] = plan.shape;
  std::string text = fmt::format("{}: {} ranks with {} {} each, {} microbatches\n\n{}\n",
                                 name_of(kind), ranks, chunks, chunks == 1 ? "stage" : "stages",
                                 microbatches, schedule_text(plan, kPictureColumns));
  text +=
      fmt::format("bubble            {} of all ranks' time; published{}: {}\n",
                  percent(plan.times.bubble), plan.costs.transfer > 0 ? ", without transfers" : "",
                  percent(published_bubble(plan.shape, plan.costs)));
  text += fmt::format("                  {} between the first and the last pass of a rank\n",
                      percent(plan.times.inner_bubble));
  text += fmt::format(
      "peak activations  {} of one stage and microbatch, {:.4g} times those of a rank's layers\n",
      plan.peak_activations(), peak_per_stage(plan));
  text += fmt::format(
      "makespan          {:g}, with forward {:g}, backward {:g} + {:g}, transfer {:g}{}\n",
      plan.times.makespan, plan.costs.forward, plan.costs.backward_input,
      plan.costs.backward_weight, plan.costs.transfer,
      plan.costs.recompute > 0 ? fmt::format(", recomputation {:g}", plan.costs.recompute) : "");
  return text +
         "checked           every pass once, no rank waits forever, activations as the formula\n";
}

Json to_json(const PlannedSchedule& plan) {
  Json json{{"schedule", name_of(plan.shape.kind)},
            {"pp", plan.shape.ranks},
            {"microbatches", plan.shape.microbatches},
            {"virtual", plan.shape.chunks},
            {"bubble", plan.times.bubble},
            {"published_bubble", published_bubble(plan.shape, plan.costs)},
            {"inner_bubble", plan.times.inner_bubble},
            {"peak_activations", plan.peak_activations()},
            {"rank_peak_activations", plan.times.peak_activations},
            {"makespan", plan.times.makespan},
            {"costs",
             {{"forward", plan.costs.forward},
              {"backward_input", plan.costs.backward_input},
              {"backward_weight", plan.costs.backward_weight},
              {"transfer", plan.costs.transfer},
              {"recompute", plan.costs.recompute}}}};
  // Indexed by PassKind.
  constexpr std::array<std::string_view, 4> kPasses{"forward", "backward", "backward_input",
                                                    "backward_weight"};
  Json& ranks = json["ranks"] = Json::array();
  for (size_t rank = 0; rank < plan.actions.size(); ++rank) {
    Json passes = Json::array();
    for (size_t i = 0; i < plan.actions[rank].size(); ++i) {
      const auto& action = plan.actions[rank][i];
      passes.push_back({{"pass", kPasses[size_t(action.pass)]},
                        {"stage", stage_of(plan.shape, int(rank), action.chunk)},
                        {"microbatch", action.microbatch},
                        {"begin", plan.times.passes[rank][i].begin},
                        {"end", plan.times.passes[rank][i].end}});
    }
    ranks.push_back(std::move(passes));
  }
  return json;
}

/// Schedules of one shape, those that exist for it, and why the others do not.
struct Comparison {
  std::vector<PlannedSchedule> plans;
  std::vector<std::string> reasons;
};

Comparison make_comparison(const ScheduleOptions& options) {
  Comparison comparison;
  for (const PipelineKind kind : schedule::pipeline_kinds()) {
    const PipelineShape shape = make_shape(options, kind);
    try {
      check_pipeline(shape);
    } catch (const ConfigError& error) {
      comparison.reasons.push_back(error.what());
      continue;
    }
    comparison.plans.push_back(make_plan(options, shape));
  }
  return comparison;
}

std::string table(const Comparison& comparison) {
  std::string text =
      "| schedule | stages per rank | bubble | published | between a rank's passes | peak "
      "activations | per stage of a rank |\n| --- | --- | --- | --- | --- | --- | --- |\n";
  for (const PlannedSchedule& plan : comparison.plans) {
    text += fmt::format(
        "| `{}` | {} | {} | {} | {} | {} | {:.4g} |\n", name_of(plan.shape.kind), plan.shape.chunks,
        percent(plan.times.bubble), percent(published_bubble(plan.shape, plan.costs)),
        percent(plan.times.inner_bubble), plan.peak_activations(), peak_per_stage(plan));
  }
  for (const std::string& reason : comparison.reasons) text += reason + "\n";
  return text;
}

void compare(const ScheduleOptions& options) {
  const Comparison comparison = make_comparison(options);
  if (options.output.is_given()) {
    Json json = Json::array();
    for (const PlannedSchedule& plan : comparison.plans) json.push_back(to_json(plan));
    options.output.write_json(dump_json(json, 1) + "\n");
  }
  if (options.output.shows_text()) fmt::print("{}", table(comparison));
}

void show(const ScheduleOptions& options) {
  const PlannedSchedule plan =
      make_plan(options, make_shape(options, schedule::parse_pipeline_kind(options.schedule)));
  if (!options.svg.empty()) write_output(options.svg, schedule_svg(plan));
  options.output.write_json(dump_json(to_json(plan), 1) + "\n");
  if (!options.output.shows_text()) return;
  fmt::print("{}", describe(plan));
  if (!options.svg.empty()) fmt::print("Wrote {}\n", single_line(options.svg));
}

void add_schedule(CLI::App& plan) {
  auto* command =
      plan.add_subcommand("schedule", "Show a pipeline schedule: order, bubble and memory");
  auto options = std::make_shared<ScheduleOptions>();
  command->add_option("--pp", options->ranks, "Pipeline ranks")
      ->required()
      ->check(CLI::Range(1, kMaxPlannedRanks));
  command->add_option("--microbatches", options->microbatches, "Microbatches of a step")
      ->required()
      ->check(CLI::Range(1, kMaxMicrobatches));
  command->add_option(
      "--schedule", options->schedule,
      "Schedule: gpipe, 1f1b, interleaved, zb-h1, zb-v or dualpipe-v (default: a table of all)");
  command
      ->add_option("--virtual", options->chunks,
                   "Stages per rank (default: the fewest that the schedule needs)")
      ->check(CLI::Range(1, kMaxChunks));
  command
      ->add_option(
          "--costs", options->costs,
          "Time of a stage's forward pass, backward pass for its input, and for its weights")
      ->delimiter(',')
      ->expected(3)
      ->capture_default_str();
  command
      ->add_option("--transfer", options->transfer, "Time of a transfer between ranks, same unit")
      ->capture_default_str()
      ->check(CLI::Range(0.0, 1e6));
  command
      ->add_option("--recompute", options->recompute,
                   "Time to recompute a stage's activations before its backward pass, same unit "
                   "(train.recompute)")
      ->capture_default_str()
      ->check(CLI::Range(0.0, 1e6));
  add_json_option(*command, options->output);
  command->add_option("--svg", options->svg, "Draw the schedule in FILE");
  command->footer(
      "\nSimulates ranks that run their passes in order, each as soon as its inputs are there. "
      "The\n"
      "bubble is the idle share of all ranks' time, next to what the schedule's source states.\n"
      "\nExamples:\n"
      "  tandem plan schedule --pp 4 --microbatches 8                     all schedules\n"
      "  tandem plan schedule --pp 4 --microbatches 8 --schedule 1f1b\n"
      "  tandem plan schedule --pp 4 --microbatches 8 --schedule interleaved --virtual 3\n"
      "  tandem plan schedule --pp 4 --microbatches 8 --recompute 1       all, with recomputation\n"
      "  tandem plan schedule --pp 4 --microbatches 12 --schedule zb-v --svg zb-v.svg");
  command->callback([options] {
    check_options(*options);
    options->output.check();
    options->schedule.empty() ? compare(*options) : show(*options);
  });
}

}  // namespace

void add_plan(CLI::App& app) {
  auto* command = app.add_subcommand(
      "plan", "Plan a run: tokens/s, layouts, pipeline schedules, tensors on ranks");
  command->require_subcommand(0, 1);
  add_plan_fit(*command);
  add_schedule(*command);
  add_plan_placements(*command);
  command->footer(
      "Answers with tokens/s, MFU, days and cost in the fastest layout, and an error bar: 80 % of\n"
      "published runs are within it when each is predicted from other sources' runs.\n"
      "\n--fit calibrates a cost of training steps on measured runs (columns as in\n"
      "bench/published/runs.csv; others are ignored) and predicts runs that it has not seen, next "
      "to\n"
      "two baselines: constant FLOP/s, and a straight line through the runs of a layout. Errors "
      "are\n"
      "in percent of the measured step.\n"
      "\nExamples:\n"
      "  tandem plan llama-3-8b --gpus 64 --hardware h100\n"
      "  tandem plan qwen3-30b-a3b --gpus 256 --hardware b200 --tokens 1e12 --price 3\n"
      "  tandem plan job.toml --gpus 64 --hardware h100.toml --out planned.toml\n"
      "  tandem plan --fit runs.csv --predict new.csv --json -\n"
      "  tandem plan --fit runs.csv --leave-out model --where group=mosaic-mpt,gpu=H100\n"
      "  tandem plan --fit runs.csv --fit-where 'gpus<=1024' --where 'gpus>1024'\n"
      "  tandem plan job.toml --gpus 64 --hardware h100.toml --page plan.html\n"
      "  tandem plan job.toml --gpus 64 --hardware h100.toml --chakra traces\n"
      "  tandem plan schedule --pp 4 --microbatches 8                     all schedules\n"
      "  tandem plan schedule --pp 4 --microbatches 8 --schedule zb-h1    picture, bubble, memory\n"
      "  tandem plan placements configs/tiny.toml --tp 2 --dp 2           what each rank holds");
}

}  // namespace tandem::cli
