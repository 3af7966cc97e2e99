#include "cli/devices.h"

#include <fmt/format.h>

#include "tandem/cuda.h"
#include "tandem/error.h"

namespace tandem::cli {

void add_device_options(CLI::App& command, DeviceOptions& options) {
  command
      .add_option("--device", options.device,
                  "Ranks are CPU threads or processes (cpu), or GPUs (gpu)")
      ->check(CLI::IsMember({"cpu", "gpu"}));
  command
      .add_option("--ranks-per-gpu", options.ranks_per_gpu,
                  "With --device gpu: ranks that share the first GPU, for tests")
      ->check(CLI::Range(1, 16));
}

void set_devices(const DeviceOptions& options, WorldOptions& world) {
  world.ranks_per_gpu = options.ranks_per_gpu;
  if (!options.on_gpus()) {
    if (options.ranks_per_gpu == 1) return;
    throw InvalidArgument(
        fmt::format("--ranks-per-gpu {}: expected --device gpu with it", options.ranks_per_gpu));
  }
  if (launched()) return;
  const int gpus = gpu_count();
  if (gpus == 0) {
    throw Unsupported("--device gpu: this build has no CUDA, or this machine no GPU");
  }
  if (world.ranks_per_gpu > 1 ? world.ranks <= world.ranks_per_gpu : world.ranks <= gpus) return;
  throw InvalidArgument(
      fmt::format("--device gpu: {} ranks, {} GPUs, {} ranks per GPU: expected a GPU per rank, or "
                  "all ranks on the first one (--ranks-per-gpu {})",
                  world.ranks, gpus, world.ranks_per_gpu, world.ranks));
}

void run_ranks(const DeviceOptions& options, const WorldOptions& world,
               const std::function<void(Communicator&)>& body) {
  options.on_gpus() ? run_gpus(world, body) : run_world(world, body);
}

}  // namespace tandem::cli
