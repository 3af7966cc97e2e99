#include <fmt/format.h>

#include <memory>
#include <string>
#include <vector>

#include "cli/commands.h"
#include "train/trainer.h"

namespace tandem::cli {
namespace {

struct TrainArguments {
  std::string config, out;
  std::vector<std::string> overrides;
  int ranks = 0, tp = 0, dp = 0;
  bool resume = false;
};

void run(const TrainArguments& arguments) {
  TrainRequest request;
  request.out = arguments.out;
  request.resume = arguments.resume;
  request.config = load_config(arguments.config, arguments.overrides);
  auto& parallel = request.config.parallel;
  if (arguments.tp > 0) parallel.tp = arguments.tp;
  if (arguments.dp > 0) parallel.dp = arguments.dp;
  if (arguments.ranks > 0) {
    if (arguments.dp == 0 && arguments.ranks % parallel.tp == 0) {
      parallel.dp = arguments.ranks / parallel.tp;
    }
    if (parallel.tp * parallel.dp != arguments.ranks) {
      throw InvalidArgument(fmt::format("--ranks {}: expected tp x dp = {} x {} = {}",
                                        arguments.ranks, parallel.tp, parallel.dp,
                                        parallel.tp * parallel.dp));
    }
  }
  check_config(request.config);
  WorldOptions world;
  world.ranks = int(parallel.tp * parallel.dp);
  if (!parallel.link.empty()) world.link = EmulatedLink::parse(parallel.link);
  const Corpus corpus(request.config.data.paths, request.config.data.heldout);
  run_world(world, [&](Communicator& comm) { train(comm, request, corpus); });
}

}  // namespace

void add_train(CLI::App& app) {
  auto* command = app.add_subcommand("train", "Train a model on text");
  auto arguments = std::make_shared<TrainArguments>();
  command->add_option("config", arguments->config, "Job file (TOML)")->required();
  command->add_option("--out", arguments->out, "Directory for metrics, checkpoints and the model")
      ->required();
  command
      ->add_option("--ranks", arguments->ranks,
                   "All ranks; without --dp, data parallel is ranks / tp")
      ->check(CLI::Range(1, 4096));
  command->add_option("--tp", arguments->tp, "Tensor parallel ranks (parallel.tp)")
      ->check(CLI::Range(1, 4096));
  command->add_option("--dp", arguments->dp, "Data parallel ranks (parallel.dp)")
      ->check(CLI::Range(1, 4096));
  command
      ->add_option("--set", arguments->overrides,
                   "table.key=value over the job file; the value is TOML, or else a string")
      ->allow_extra_args(false)
      ->take_all();
  command->add_flag("--resume", arguments->resume,
                    "Go on from the newest valid checkpoint in --out");
  command->footer("\nKeys of the job file:\n" + describe_config_keys() +
                  "\nRanks are threads of this process, or under mpirun its processes."
                  "\n\nExamples:"
                  "\n  tandem train configs/tiny.toml --tp 2 --dp 2 --out out/tiny"
                  "\n  mpirun -n 4 tandem train configs/tiny.toml --tp 2 --dp 2 --out out/tiny"
                  "\n  tandem train configs/tiny.toml --out out/own --set data.paths=/usr/include "
                  "--set train.steps=200"
                  "\n  tandem train configs/tiny.toml --tp 4 --out out/tiny --resume");
  command->callback([arguments] { run(*arguments); });
}

}  // namespace tandem::cli
