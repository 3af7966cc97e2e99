#include "cli/devices.h"

#include <fmt/format.h>

#include <filesystem>
#include <system_error>
#include <utility>

#include "comm/rendezvous/launch.h"
#include "core/system/console.h"
#include "core/system/env.h"
#include "core/system/machine.h"
#include "core/system/printable.h"
#include "gemm/gemm.h"
#include "tandem/cuda.h"
#include "tandem/error.h"

namespace tandem::cli {
namespace {

/// Says so before anything else is looked at: other errors would be of a job for GPUs.
void require_gpu(const std::string& device) {
  if (device != "gpu" || launched() || gpu_count() > 0) return;
  throw Unsupported("--device gpu: this build has no CUDA, or this machine no GPU");
}

/// Whether the kernel drives NVIDIA GPUs, also those that this build or process cannot use.
bool has_gpu_driver() {
  std::error_code unknown;
  return std::filesystem::exists("/proc/driver/nvidia/version", unknown);
}

}  // namespace

void add_device_options(CLI::App& command, DeviceOptions& options) {
  command
      .add_option("--device", options.device,
                  "Run on CPU threads or processes, or on GPUs (default: GPUs if there is one for "
                  "each rank and it takes the job)")
      ->check(CLI::IsMember({"cpu", "gpu"}))
      ->each(require_gpu);
  command
      .add_option("--ranks-per-gpu", options.ranks_per_gpu,
                  "Run N ranks on the first GPU, for tests")
      ->check(CLI::Range(1, 16));
}

int count_ranks(const WorldOptions& world) {
  if (const auto mpi = launched_by_some_mpi(); mpi && launched_by_mpi()) return mpi->size;
  const auto launch = launched_by_environment();
  return launch ? launch->size : world.ranks;
}

DeviceChoice default_device(const WorldOptions& world, const DeviceNeeds& needs,
                            const std::string& cpu_option) {
  if (env().device != "auto") return {env().device == "gpu", ""};
  Gpus gpus = this_machines_gpus();
  if (gpus.count == 0 && !has_gpu_driver()) gpus.missing.clear();
  const int ranks = count_ranks(world), here = ranks_here(ranks);
  DeviceRequest request{.ranks = here,
                        .ranks_per_gpu = world.ranks_per_gpu,
                        .one_host = here == ranks,
                        .cpu_only = needs.cpu_only};
  if (world.link && world.ranks_per_gpu == 1) request.cpu_only = "an emulated link";
  const DeviceChoice choice = choose_device(gpus, request, cpu_option);
  if (!choice.on_gpus || !needs.check_gpus) return choice;
  try {
    request.rank_bytes = needs.check_gpus();
  } catch (const Error& refusal) {
    request.cpu_only = refusal.what();
  }
  return choose_device(gpus, request, cpu_option);
}

void set_devices(DeviceOptions& options, WorldOptions& world, const DeviceNeeds& needs) {
  world.ranks_per_gpu = options.ranks_per_gpu;
  if (options.device.empty()) {
    DeviceChoice choice = default_device(world, needs);
    options.device = choice.on_gpus ? "gpu" : "cpu";
    options.note = std::move(choice.note);
  }
  if (!options.on_gpus()) {
    if (options.ranks_per_gpu == 1) return;
    throw InvalidArgument(
        fmt::format("--ranks-per-gpu {}: expected --device gpu with it", options.ranks_per_gpu));
  }
  if (launched()) return;
  require_gpu(options.device);
  const int gpus = gpu_count();
  if (world.ranks_per_gpu > 1 ? world.ranks <= world.ranks_per_gpu : world.ranks <= gpus) return;
  throw InvalidArgument(
      fmt::format("--device gpu: {} ranks, {} GPUs, {} ranks per GPU: expected a GPU per rank, or "
                  "all ranks on the first one (--ranks-per-gpu {})",
                  world.ranks, gpus, world.ranks_per_gpu, world.ranks));
}

void print_choice(const std::string& note) {
  if (!note.empty() && speaks()) complain(single_line(note));
}

std::function<void(Communicator&)> with_kernel_threads(std::function<void(Communicator&)> body) {
  return [body = std::move(body)](Communicator& comm) {
    const KernelThreads threads(threads_per_rank(comm.size()));
    body(comm);
  };
}

void run_ranks(const DeviceOptions& options, const WorldOptions& world,
               const std::function<void(Communicator&)>& body) {
  print_choice(options.note);
  const auto of_rank = with_kernel_threads(body);
  options.on_gpus() ? run_gpus(world, of_rank) : run_world(world, of_rank);
}

}  // namespace tandem::cli
