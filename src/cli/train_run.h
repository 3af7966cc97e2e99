// Training run of a command line: `tandem train` with a job file, `tandem finetune` with the job
// that it makes.
#pragma once

#include <CLI/CLI.hpp>
#include <optional>
#include <string>
#include <vector>

#include "cli/devices.h"
#include "engine/train/finetune.h"

namespace tandem::cli {

struct TrainArguments {
  std::string config, out, codec, init, inject, live;
  std::vector<std::string> overrides;
  std::optional<FinetuneRequest> finetune;  ///< in place of `config` and `init`
  int ranks = 0, tp = 0, cp = 0, dp = 0, ep = 0, pp = 0;
  DeviceOptions devices;
  bool resume = false;
};

/// Options of the layout and the devices. `arguments` must outlive the command.
void add_layout_options(CLI::App& command, TrainArguments& arguments);
/// Trains on all ranks, and prints the result with the commands that follow. Throws Error for all
/// that is wrong, before anything runs if it can be known then.
void run_training(TrainArguments arguments);

}  // namespace tandem::cli
