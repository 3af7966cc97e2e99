#include <fmt/format.h>
#include <fmt/ranges.h>

#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "bench/bench_receipt.h"
#include "bench/engine/bench_pipeline.h"
#include "bench/output/bench_output.h"
#include "cli/commands.h"
#include "cli/result_output.h"
#include "core/system/console.h"
#include "core/system/files.h"
#include "core/system/json.h"
#include "schedule/pipeline.h"
#include "tandem/communicator.h"
#include "tandem/error.h"

namespace tandem::cli {
namespace {

using Json = nlohmann::ordered_json;

struct PipelineBenchArguments {
  std::vector<std::string> schedules;
  std::vector<int> ranks{2, 4}, microbatches{8, 16};
  std::vector<double> costs_ms{8, 8, 8};
  double transfer = 0;
  int repeats = 3;
  ResultOutput output;
};

/// Requests of all shapes that the schedules exist for.
std::vector<PipelineBench> make_requests(const PipelineBenchArguments& arguments) {
  std::vector<PipelineBench> requests;
  for (const std::string& name : arguments.schedules) {
    const schedule::PipelineKind kind = schedule::parse_pipeline_kind(name);
    const int chunks = min_chunks(kind);
    const auto seconds = [&](size_t pass) { return 1e-3 * arguments.costs_ms[pass] / chunks; };
    for (const int ranks : arguments.ranks) {
      for (const int microbatches : arguments.microbatches) {
        PipelineBench request{{kind, ranks, microbatches, chunks},
                              {seconds(0), seconds(1), seconds(2), arguments.transfer * seconds(0)},
                              arguments.repeats};
        try {
          check_pipeline(request.shape);
        } catch (const ConfigError& error) {
          if (speaks()) fmt::print(stderr, "note: {}\n", error.what());
          continue;
        }
        requests.push_back(request);
      }
    }
  }
  return requests;
}

Json to_json(const PipelineBench& q, const PipelineBenchResult& r) {
  Json us, spread, simulated;
  const auto add = [&](const char* name, const PipelineStepTimes& times) {
    us[name] = round_to(times.step.min_us, 1);
    spread[name] = {round_to(times.step.min_us, 1), round_to(times.step.max_us, 1)};
    simulated[name] = round_to(times.simulated_us, 1);
  };
  add("step", r.unlinked);
  if (r.linked) {
    add("linked", *r.linked);
    add("twice_step", *r.twice_unlinked);
    add("twice_linked", *r.twice_linked);
  }
  const schedule::PassCosts& costs = q.costs;
  Json json{{"op", "pipeline"},
            {"schedule", name_of(q.shape.kind)},
            {"pp", q.shape.ranks},
            {"microbatches", q.shape.microbatches},
            {"virtual", q.shape.chunks},
            {"transport", "threads"},
            {"passes", "emulated"},
            {"costs_us",
             {{"forward", round_to(1e6 * costs.forward, 1)},
              {"backward_input", round_to(1e6 * costs.backward_input, 1)},
              {"backward_weight", round_to(1e6 * costs.backward_weight, 1)},
              {"transfer", round_to(1e6 * costs.transfer, 1)}}},
            {"time_us", us},
            {"spread_us", spread},
            {"simulated_us", simulated},
            {"repeats", q.repeats},
            {"bubble", round_to(r.bubble(), 1e4)},
            {"simulated_bubble", round_to(r.simulated_bubble(), 1e4)},
            {"receipt", to_json(r.receipts)}};
  if (r.linked) {
    json["link"] = "emulated";
    json["exposed"] = round_to(r.exposed(), 1e4);
    json["simulated_exposed"] = round_to(r.simulated_exposed(), 1e4);
    json["steady_exposed"] = round_to(r.steady_exposed(), 1e4);
    json["simulated_steady_exposed"] = round_to(r.simulated_steady_exposed(), 1e4);
  }
  run_threads({}, [&](Communicator& comm) { json.update(origin_json(comm)); });
  return json;
}

std::string header(const PipelineBenchArguments& arguments) {
  std::string text = fmt::format(
      "passes of a rank's layers: {} ms, emulated; fastest of {} steps\n"
      "schedule     pp  microbatches  step ms  bubble %  simulated",
      fmt::join(arguments.costs_ms, ", "), arguments.repeats);
  if (arguments.transfer > 0) text += "  exposed %  simulated  steady %  simulated";
  return text + "\n";
}

std::string row(const PipelineBench& q, const PipelineBenchResult& r) {
  std::string text =
      fmt::format("{:<12} {:>2}  {:>12}  {:>7.1f}  {:>8.1f}  {:>9.1f}", name_of(q.shape.kind),
                  q.shape.ranks, q.shape.microbatches, r.unlinked.step.min_us * 1e-3,
                  100 * r.bubble(), 100 * r.simulated_bubble());
  if (r.linked) {
    text += fmt::format("  {:>9.1f}  {:>9.1f}  {:>8.1f}  {:>9.1f}", 100 * r.exposed(),
                        100 * r.simulated_exposed(), 100 * r.steady_exposed(),
                        100 * r.simulated_steady_exposed());
  }
  return text + "\n" + receipt_lines(r.receipts, 100);
}

void run(const PipelineBenchArguments& arguments) {
  const ResultOutput& output = arguments.output;
  output.check();
  const std::vector<PipelineBench> requests = make_requests(arguments);
  if (output.shows_text()) fmt::print("{}", header(arguments));
  Json all = Json::array();
  std::string failed;
  for (const PipelineBench& request : requests) {
    const PipelineBenchResult result = run_pipeline_bench(request);
    if (output.shows_text()) fmt::print("{}", row(request, result));
    finish_output();
    all.push_back(to_json(request, result));
    if (output.has_file()) output.write_json(dump_json(all, 1) + "\n");  // finished ones are saved
    if (!result.ok()) failed = name_of(request.shape.kind);
  }
  if (!output.shows_text()) output.write_json(dump_json(all, 1) + "\n");
  finish_output();
  if (failed.empty()) return;
  throw Error(
      fmt::format("bench pipeline: the bubble of {} differs from the simulated one by more "
                  "than {:.0f} % of the step",
                  failed, 100 * kMaxBubbleDifference));
}

}  // namespace

void add_bench_pipeline(CLI::App& bench) {
  auto* command = bench.add_subcommand(
      "pipeline", "Time the pipeline schedules with passes that sleep: bubble and overlap");
  auto arguments = std::make_shared<PipelineBenchArguments>();
  for (const schedule::PipelineKind kind : schedule::pipeline_kinds()) {
    arguments->schedules.emplace_back(name_of(kind));
  }
  command->add_option("--schedule", arguments->schedules, "Schedules to time")
      ->capture_default_str()
      ->delimiter(',');
  command->add_option("--pp", arguments->ranks, "Pipeline ranks, threads")
      ->capture_default_str()
      ->delimiter(',')
      ->check(CLI::Range(2, 64));
  command->add_option("--microbatches", arguments->microbatches, "Microbatches of a step")
      ->capture_default_str()
      ->delimiter(',')
      ->check(CLI::Range(1, 1024));
  command
      ->add_option("--costs", arguments->costs_ms,
                   "Milliseconds of a rank's forward pass and of its two backward passes")
      ->capture_default_str()
      ->delimiter(',')
      ->expected(3)
      ->check(CLI::Range(0.01, 1000.0));
  command
      ->add_option("--transfer", arguments->transfer,
                   "Also time an emulated link, whose messages take X forward passes of a stage")
      ->capture_default_str()
      ->check(CLI::Range(0.0, 100.0));
  command->add_option("--repeats", arguments->repeats, "Timed steps")
      ->capture_default_str()
      ->check(CLI::Range(1, 1000));
  add_json_option(*command, arguments->output);
  command->footer(
      "\nExample:\n"
      "  tandem bench pipeline --schedule 1f1b,zb-v --pp 4 --microbatches 16 --transfer 1\n"
      "\nThe training runner and its links between CPU thread ranks, with passes that sleep for\n"
      "the given time. Bubble: idle share of all ranks' time in a step. With --transfer, exposed "
      "is\n"
      "the share of a step that the link adds, steady that of the time which further microbatches\n"
      "take; the simulator's link carries any number of messages concurrently, the emulated one\n"
      "of a rank one after another. Exit code 1: a bubble differs from the simulated one by more\n"
      "than 5 % of the step.");
  command->callback([arguments] {
    now_doing("bench pipeline");
    run(*arguments);
  });
}

}  // namespace tandem::cli
