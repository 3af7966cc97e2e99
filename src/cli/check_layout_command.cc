#include <fmt/format.h>

#include <algorithm>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "cli/commands.h"
#include "cli/result_output.h"
#include "cli/usage.h"
#include "core/system/console.h"
#include "core/system/files.h"
#include "engine/check/layout_check.h"
#include "engine/checkpoint/initial_model.h"
#include "engine/config/config.h"
#include "engine/data/open_data.h"
#include "engine/parallel/dims.h"
#include "engine/plan/cost/memory.h"
#include "schedule/pipeline.h"
#include "tandem/error.h"

namespace tandem::cli {
namespace {

struct CheckArguments {
  std::string config, schedule, init;
  ResultOutput output;
  std::vector<std::string> overrides;
  int tp = 0, cp = 0, pp = 0, dp = 0, ep = 0;
};

constexpr int kDiffers = 1;  // exit code
constexpr int kMaxRanks = 64;
constexpr size_t kRows = 5;

TrainConfig make_config(const CheckArguments& arguments) {
  std::vector<std::string> notes;
  TrainConfig config =
      load_run_config(arguments.config, arguments.overrides, arguments.init, "", &notes);
  for (const std::string& each : notes) note("note: " + each);
  auto& parallel = config.parallel;
  if (arguments.tp > 0) parallel.tp = arguments.tp;
  if (arguments.cp > 0) parallel.cp = arguments.cp;
  if (arguments.pp > 0) parallel.pp = arguments.pp;
  if (arguments.dp > 0) parallel.dp = arguments.dp;
  if (arguments.ep > 0) parallel.ep = arguments.ep;
  if (!arguments.schedule.empty()) {
    parallel.schedule = arguments.schedule;
    const int chunks = schedule::min_chunks(schedule::parse_pipeline_kind(arguments.schedule));
    if (parallel.pp > 1)
      parallel.virtual_stages = std::max<int64_t>(parallel.virtual_stages, chunks);
  }
  config = checked_config(std::move(config));
  set_chat_keys(config.data);
  check_config(config);
  if (const int ranks = ParallelDims(config.parallel).ranks(); ranks > kMaxRanks) {
    throw InvalidArgument(
        fmt::format("check-layout: {} ranks: expected at most {}, threads of one "
                    "process",
                    ranks, kMaxRanks));
  }
  MemoryEstimate(config).check();
  return config;
}

std::string describe(const ParallelDims& dims, const std::string& dtype, const LayoutCheck& check) {
  std::string text = fmt::format(
      "{}, {}, against one rank: {} tensors, bound {:g}\n\n"
      "| tensor | largest difference / max | found | expected |\n"
      "| --- | --- | --- | --- |\n",
      dims.describe(), dtype, check.num_tensors(), check.bound);
  for (size_t i = 0; i < std::min(kRows, check.differences.size()); ++i) {
    const TensorDifference& d = check.differences[i];
    text += fmt::format("| {}{} | {:.2e} | {:.8g} | {:.8g} |\n",
                        d.kind == Compared::weight ? "weight " : "", d.tensor, d.relative, d.found,
                        d.expected);
  }
  if (check.ok()) return text + "\nThe layout computes what one rank does.\n";
  return text + fmt::format("\nThe layout differs from one rank in: {}.\n{}\n",
                            describe_differences(check),
                            check.axis.empty() ? "It also differs without any one of its axes."
                            : check.axis == "microbatches" ? "With one microbatch it does not."
                            : check.axis == "recompute"
                                ? "Without recomputation it does not."
                                : fmt::format("With {} 1 it does not.", check.axis));
}

std::string to_json(const LayoutCheck& check) {
  return nlohmann::ordered_json{{"worst", check.worst().relative},
                                {"tensor", check.worst().tensor},
                                {"differs", describe_differences(check)},
                                {"axis", check.axis},
                                {"tensors", check.num_tensors()},
                                {"loss", check.of("loss").relative},
                                {"bound", check.bound},
                                {"ok", check.ok()}}
             .dump() +
         "\n";
}

void run(const CheckArguments& arguments) {
  if (launched()) {
    throw InvalidArgument("check-layout: runs as threads of one process: expected no launcher");
  }
  const TrainConfig config = make_config(arguments);
  arguments.output.check();
  now_doing("checking the layout of " + arguments.config);
  const auto data = open_data(config.data, config.model.vocab, config.train);
  const LayoutCheck check = check_layout(config, *data, run_one_rank(config, *data));
  arguments.output.write_json(to_json(check));
  if (arguments.output.shows_text())
    fmt::print("{}", describe(ParallelDims(config.parallel), config.train.dtype, check));
  if (check.ok()) return;
  finish_output();
  throw Ended{kDiffers};
}

}  // namespace

void add_check_layout(CLI::App& app) {
  auto* command =
      app.add_subcommand("check-layout", "Check that a layout computes what one rank does");
  auto arguments = std::make_shared<CheckArguments>();
  command->add_option("config", arguments->config, "Job file (TOML)")->required();
  const auto add_size = [&](const char* name, int& size, const char* help) {
    command->add_option(name, size, help)->check(CLI::Range(1, kMaxRanks));
  };
  add_size("--tp", arguments->tp, "Tensor parallel ranks (parallel.tp)");
  add_size("--cp", arguments->cp, "Context parallel ranks (parallel.cp)");
  add_size("--pp", arguments->pp, "Pipeline parallel ranks (parallel.pp)");
  add_size("--dp", arguments->dp, "Data parallel ranks (parallel.dp)");
  add_size("--ep", arguments->ep,
           "Expert parallel ranks, among the data parallel ones (parallel.ep)");
  command->add_option(
      "--schedule", arguments->schedule,
      "Pipeline schedule (parallel.schedule), with at least the stages per rank that "
      "it needs");
  command
      ->add_option(
          "--set", arguments->overrides,
          "Override keys of the job file (table.key=value); a value is TOML, or else a string")
      ->allow_extra_args(false)
      ->take_all();
  add_init_option(*command, arguments->init);
  add_json_option(*command, arguments->output, "the result", "it");
  command->footer(
      "\nRuns the first step in the layout and on one rank, with the same samples and\n"
      "microbatches, as CPU threads, and compares the weights, the losses, the gradient norm and\n"
      "the gradient of every tensor. A difference is |found - expected| / max |expected| of a\n"
      "tensor. Its bound: 2e-6 in f32, the dtype unless train.dtype is bf16 or fp8, times the\n"
      "root of a step's tokens / 512 if they are more; 2e-2 in bf16, 0.3 in fp8. Beyond it the\n"
      "exit code is 1, and the command names all that differs and the axis whose size, or the\n"
      "microbatches whose number, set to 1 makes the difference vanish.\n"
      "\nExamples:\n"
      "  tandem check-layout configs/tiny.toml --tp 2 --dp 2\n"
      "  tandem check-layout configs/moe.toml --tp 2 --dp 2 --ep 2 --json -\n"
      "  tandem check-layout configs/tiny.toml --pp 2 --schedule zb-v --set model.layers=4");
  command->callback([arguments] { run(*arguments); });
}

}  // namespace tandem::cli
