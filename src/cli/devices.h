// Options --device and --ranks-per-gpu of commands whose ranks may be on GPUs.
#pragma once

#include <CLI/CLI.hpp>
#include <functional>
#include <string>

#include "comm/world/device_choice.h"
#include "tandem/communicator.h"

namespace tandem::cli {

struct DeviceOptions {
  std::string device;  ///< cpu or gpu; empty if not given, until set_devices
  int ranks_per_gpu = 1;
  std::string note;  ///< line of a choice, which run_ranks prints; empty: none was made

  bool on_gpus() const { return device == "gpu"; }
};

void add_device_options(CLI::App& command, DeviceOptions& options);

/// Properties of a command that its device depends on.
struct DeviceNeeds {
  std::string cpu_only = {};  ///< reason that only CPU ranks run it, or empty
  /// Returns the GPU memory that a rank needs, as far as known; throws the Error of a job that GPUs
  /// refuse.
  std::function<double()> check_gpus = {};
};

/// The device in TANDEM_DEVICE, or else that of choose_device on this machine for `world`'s ranks.
DeviceChoice default_device(const WorldOptions& world, const DeviceNeeds& needs,
                            const std::string& cpu_option = "--device cpu");

/// Sets world.ranks_per_gpu, and the device if it was not given. Throws if threads of this process
/// cannot be those ranks: InvalidArgument, or Unsupported without a GPU.
void set_devices(DeviceOptions& options, WorldOptions& world, const DeviceNeeds& needs = {});

/// Number of ranks: a launcher's, or `world.ranks` threads.
int count_ranks(const WorldOptions& world);

/// Prints the note on stderr, from the process that reports under a launcher.
void print_choice(const std::string& note);

/// `body` with this rank's share of the processors.
std::function<void(Communicator&)> with_kernel_threads(std::function<void(Communicator&)> body);

/// Prints the choice and runs `body` on CPU or GPU ranks, with_kernel_threads.
void run_ranks(const DeviceOptions& options, const WorldOptions& world,
               const std::function<void(Communicator&)>& body);

}  // namespace tandem::cli
