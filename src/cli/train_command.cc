#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "cli/commands.h"
#include "cli/help.h"
#include "cli/train_run.h"
#include "core/system/lines.h"
#include "core/system/printable.h"
#include "engine/config/config.h"
#include "tandem/error.h"

namespace tandem::cli {
namespace {

constexpr std::string_view kAllKeys = "keys";

/// Tables of the job file, in the order of its keys.
std::vector<std::string> key_tables() {
  std::vector<std::string> tables;
  for (const ConfigKey& key : config_keys()) {
    const std::string table(key.name.substr(0, key.name.find('.')));
    if (std::ranges::find(tables, table) == tables.end()) tables.push_back(table);
  }
  return tables;
}

void print_keys(const std::string& table) {
  const std::vector<std::string> tables = key_tables();
  if (table != kAllKeys && std::ranges::find(tables, table) == tables.end()) {
    throw InvalidArgument(fmt::format("--help {}: expected one of {}, {}", printable(table),
                                      fmt::join(tables, ", "), kAllKeys));
  }
  constexpr size_t kName = 31, kColumn = kName + 2;
  for (const std::string_view line : Lines(describe_config_keys())) {
    if (table != kAllKeys && !line.starts_with(table + ".")) continue;
    fmt::print("  {}{}\n", line.substr(0, kName), wrapped(line.substr(kName), kColumn, kColumn));
  }
}

void add_run_options(CLI::App& command, TrainArguments& arguments) {
  command.option_defaults()->group("Job");
  command.add_option("config", arguments.config, "Job file (TOML)")->required();
  command.add_option("--out", arguments.out, "Folder for metrics, checkpoints and the model")
      ->required();
  command
      .add_option(
          "--set", arguments.overrides,
          "Override keys of the job file (table.key=value); a value is TOML, or else a string")
      ->allow_extra_args(false)
      ->take_all();
  command.add_option("--init", arguments.init,
                     "Start from the weights of a model, in a Hugging Face folder or one that "
                     "train wrote, with its keys, tokenizer and chat template; optimizer.lr is "
                     "2e-5 unless the job has another, moments are zero, the step is 0");
  command.add_flag("--resume", arguments.resume,
                   "Continue from the newest valid checkpoint in --out, or from newer snapshots "
                   "that tandem launch holds in memory");
}

constexpr const char* kTrainFooter = R"(
Keys of the job file: tandem train --help TABLE, such as tandem train --help optimizer.

Ranks are threads of this process, or under mpirun, torchrun or srun their processes.
Ctrl-C (SIGINT), SIGTERM or SIGHUP ends the run after the current step, with a checkpoint; a
second one, more than a second later, ends it at once. mpirun gives its ranks one second for
that; for longer: mpirun --mca odls_base_sigkill_timeout 60. SIGUSR1 or SIGUSR2 saves a
checkpoint, and the run continues.

Examples:
  tandem train configs/tiny.toml --tp 2 --dp 2 --out out/tiny
  tandem train configs/moe.toml --dp 2 --ep 2 --out out/moe
  tandem train configs/tiny.toml --pp 2 --out out/stages --set train.microbatch=2
  tandem train configs/tiny.toml --tp 4 --out out/tiny --resume --set train.steps=100
  mpirun -n 2 tandem train configs/tiny.toml --tp 2 --out out/processes
  tandem train configs/tiny.toml --out out/own --set data.paths=include train.steps=200
  tandem train configs/tiny.toml --tp 2 --out out/traced --set trace.enabled=true
  tandem train configs/tiny.toml --out out/held --set data.val_fraction=0.3)";

}  // namespace

bool print_key_help(int argc, const char* const* argv) {
  const auto is_name = [](std::string_view word) {
    return std::ranges::all_of(word, [](char c) { return c >= 'a' && c <= 'z'; });
  };
  if (argc < 2 || argv[1] != std::string_view("train")) return false;
  for (int i = 2; i + 1 < argc; ++i) {
    const std::string_view word = argv[i];
    if ((word != "--help" && word != "-h") || !is_name(argv[i + 1])) continue;
    print_keys(argv[i + 1]);
    return true;
  }
  return false;
}

void add_train(CLI::App& app) {
  auto* command = app.add_subcommand("train", "Train a model on text");
  auto arguments = std::make_shared<TrainArguments>();
  command
      ->set_help_flag(
          "-h,--help",
          fmt::format("Print this help, or the keys of a table of the job file: {}; {}: all",
                      fmt::join(key_tables(), ", "), kAllKeys))
      ->option_text("[TABLE]");
  add_run_options(*command, *arguments);
  add_layout_options(*command, *arguments);
  command->option_defaults()->group("Watching and testing");
  command->add_option(
      "--live", arguments->live,
      "Serve a page of the run while it trains (tandem report OUT --live does so later)");
  command->add_option(
      "--inject", arguments->inject,
      "Inject faults, for tests (TOML): kill, hang or slow ranks, flip bits, fail writes");
  command->footer(kTrainFooter);
  command->callback([arguments] { run_training(*arguments); });
}

}  // namespace tandem::cli
