// Options --device and --ranks-per-gpu of commands whose ranks may be on GPUs.
#pragma once

#include <CLI/CLI.hpp>
#include <functional>
#include <string>

#include "tandem/communicator.h"

namespace tandem::cli {

struct DeviceOptions {
  std::string device = "cpu";
  int ranks_per_gpu = 1;

  bool on_gpus() const { return device == "gpu"; }
};

void add_device_options(CLI::App& command, DeviceOptions& options);

/// Sets world.ranks_per_gpu. Throws, before anything is read, if threads of this process cannot be
/// those ranks: InvalidArgument, or Unsupported without a GPU.
void set_devices(const DeviceOptions& options, WorldOptions& world);

/// Runs `body` on CPU or GPU ranks.
void run_ranks(const DeviceOptions& options, const WorldOptions& world,
               const std::function<void(Communicator&)>& body);

}  // namespace tandem::cli
