#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "cli/commands.h"
#include "cli/result_output.h"
#include "cli/usage.h"
#include "core/system/console.h"
#include "core/system/json.h"
#include "engine/checkpoint/initial_model.h"
#include "engine/config/config.h"
#include "engine/model/parameter_patterns.h"
#include "engine/parallel/dims.h"
#include "engine/parallel/step_placements.h"

namespace tandem::cli {
namespace {

struct PlacementsOptions {
  std::string config, init;
  ResultOutput output;
  std::vector<std::string> overrides;
  int64_t tp = 0, cp = 0, pp = 0, dp = 0, ep = 0;
  bool all = false;
};

TrainConfig load_layout(const PlacementsOptions& options) {
  std::vector<std::string> notes;
  TrainConfig config = load_run_config(options.config, options.overrides, options.init, "", &notes);
  for (const std::string& each : notes) note("note: " + each);
  auto& parallel = config.parallel;
  for (const auto& [given, size] : {std::pair{options.tp, &parallel.tp},
                                    {options.cp, &parallel.cp},
                                    {options.pp, &parallel.pp},
                                    {options.dp, &parallel.dp},
                                    {options.ep, &parallel.ep}}) {
    if (given > 0) *size = given;
  }
  check_config(config);
  return config;
}

std::array<std::string, kNumLearnerAxes> describe_axes(const PlacedTensor& tensor,
                                                       const ParallelDims& dims) {
  std::array<std::string, kNumLearnerAxes> texts;
  for (int axis = 0; axis < kNumLearnerAxes; ++axis) {
    texts[size_t(axis)] = dims.size({Axis(axis)}) == 1 ? "–" : tensor.over(Axis(axis)).describe();
  }
  return texts;
}

/// Line of the table: a tensor, or those of several layers or experts.
struct PlacementsLine {
  std::string name, made_by;
  std::array<std::string, kNumLearnerAxes> axes;

  /// Adds a tensor that differs in no more than the rank that holds it.
  bool add(const PlacementsLine& other) {
    if (name != other.name || made_by != other.made_by) return false;
    const auto is_rank = [](const std::string& text) {
      return text.find("rank") == 0 || text == "one rank";
    };
    for (size_t i = 0; i < axes.size(); ++i) {
      if (axes[i] != other.axes[i] && !(is_rank(axes[i]) && is_rank(other.axes[i]))) return false;
    }
    for (size_t i = 0; i < axes.size(); ++i) {
      if (axes[i] != other.axes[i]) axes[i] = "one rank";
    }
    return true;
  }
};

std::vector<PlacementsLine> make_lines(const PlacementTable& table, const ParallelDims& dims,
                                       bool all) {
  std::vector<PlacementsLine> lines;
  for (const PlacedTensor& tensor : table.tensors()) {
    const PlacementsLine line{all ? tensor.name : to_pattern(tensor.name, true), tensor.made_by,
                              describe_axes(tensor, dims)};
    if (all || std::ranges::none_of(lines, [&](PlacementsLine& l) { return l.add(line); })) {
      lines.push_back(line);
    }
  }
  return lines;
}

std::string placements_text(const PlacementTable& table, const ParallelDims& dims, bool all) {
  std::string text = "| tensor |", rule = "| --- | --- |";
  for (int axis = 0; axis < kNumLearnerAxes; ++axis) {
    text += fmt::format(" {} {} |", name_of(Axis(axis)), dims.size({Axis(axis)}));
    rule += " --- |";
  }
  text += " made by |\n" + rule + "\n";
  for (const PlacementsLine& line : make_lines(table, dims, all)) {
    text += fmt::format("| {} | {} | {} |\n", line.name, fmt::join(line.axes, " | "), line.made_by);
  }
  return text + fmt::format("\n{} tensors; every operator can consume its operands.\n",
                            table.tensors().size());
}

std::string placements_json(const PlacementTable& table, const ParallelDims& dims) {
  nlohmann::ordered_json json{{"axes", nlohmann::ordered_json::object()},
                              {"tensors", nlohmann::ordered_json::array()}};
  for (int axis = 0; axis < kNumLearnerAxes; ++axis) {
    json["axes"][name_of(Axis(axis))] = dims.size({Axis(axis)});
  }
  for (const PlacedTensor& tensor : table.tensors()) {
    nlohmann::ordered_json& entry = json["tensors"].emplace_back();
    entry["tensor"] = tensor.name;
    for (int axis = 0; axis < kNumLearnerAxes; ++axis) {
      entry[name_of(Axis(axis))] = tensor.over(Axis(axis)).describe();
    }
    entry["made_by"] = tensor.made_by;
  }
  return dump_json(json, 1) + "\n";
}

void show_placements(const PlacementsOptions& options) {
  options.output.check();
  const TrainConfig config = load_layout(options);
  const ParallelDims dims(config.parallel);
  const PlacementTable table = step_placements(config.model, config.parallel);
  options.output.write_json(placements_json(table, dims));
  if (options.output.shows_text()) fmt::print("{}", placements_text(table, dims, options.all));
}

}  // namespace

void add_plan_placements(CLI::App& plan) {
  auto* command = plan.add_subcommand(
      "placements", "Show how the tensors of a training step are placed on ranks");
  auto options = std::make_shared<PlacementsOptions>();
  command->add_option("config", options->config, "Job file (TOML)")->required();
  const auto add_size = [&](const char* name, int64_t& size, const char* help) {
    command->add_option(name, size, help)->check(CLI::Range(1, 4096));
  };
  add_size("--tp", options->tp, "Tensor parallel ranks (parallel.tp)");
  add_size("--cp", options->cp, "Context parallel ranks (parallel.cp)");
  add_size("--pp", options->pp, "Pipeline parallel ranks (parallel.pp)");
  add_size("--dp", options->dp, "Data parallel ranks (parallel.dp)");
  add_size("--ep", options->ep,
           "Expert parallel ranks, among the data parallel ones (parallel.ep)");
  command
      ->add_option(
          "--set", options->overrides,
          "Override keys of the job file (table.key=value); a value is TOML, or else a string")
      ->allow_extra_args(false)
      ->take_all();
  add_init_option(*command, options->init);
  command->add_flag(
      "--all", options->all,
      "Print a line for every tensor (default: one for those of all layers or experts)");
  add_json_option(*command, options->output, "all tensors");
  command->footer(
      "\nOver the ranks of an axis a tensor is\n"
      "  replicated     the same on all of them\n"
      "  partial        the sum of what they have\n"
      "  sharded(0)     in ranges of dimension 0: tokens, output features; sharded(1): features\n"
      "  sharded(flat)  in ranges of its elements, each updated by one rank\n"
      "  rank 1         on this rank only; the others have nothing\n"
      "Data parallelism is the axes ep and expert_dp together. A job is refused before its first\n"
      "step if an operator cannot consume a tensor as it is.\n"
      "\nExamples:\n"
      "  tandem plan placements configs/tiny.toml --tp 2 --dp 2\n"
      "  tandem plan placements configs/moe.toml --tp 2 --dp 4 --ep 2 --pp 2 --all");
  command->callback([options] { show_placements(*options); });
}

}  // namespace tandem::cli
