#include "comm/nccl/start.h"

#include <cuda_runtime_api.h>
#include <fmt/format.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <mutex>
#include <optional>
#include <string>

#include "comm/device/gpu_coordinates.h"
#include "comm/device/gpu_environment.h"
#include "comm/device/link_pacer.h"
#include "comm/one_gpu/pair_exchange.h"
#include "comm/rendezvous/launch.h"
#include "core/cuda/driver.h"
#include "core/system/blocked_signals.h"
#include "core/system/env.h"
#include "core/system/log.h"
#include "tandem/cuda.h"

namespace tandem {
namespace {

std::atomic<bool> graphs_fit = true;
std::optional<std::string> nvls_before;

bool cuda_was_in_use() {
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess) return false;
  const auto state =
      gpu::driver_function<decltype(&cuDevicePrimaryCtxGetState)>("cuDevicePrimaryCtxGetState");
  for (int device = 0; device < count; ++device) {
    unsigned flags = 0;
    int active = 0;
    if (state(device, &flags, &active) == CUDA_SUCCESS && active) return true;
  }
  return false;
}

// Called before the first CUDA or NCCL call. NCCL connections are made with a communicator, since a
// lazy one would wait for a kernel that waits for it.
void configure() {
  static std::once_flag once;
  std::call_once(once, [] {
    const char* const queues = "CUDA_DEVICE_MAX_CONNECTIONS";
    if (const char* nvls = std::getenv("NCCL_NVLS_ENABLE")) nvls_before = nvls;
    const GpuEnvironment environment = gpu_environment(std::getenv);
    for (const std::string& line : environment.warnings) log_message(LogLevel::warn, line);
    bool sets_queues = false;
    for (const auto& [name, value] : environment.to_set) {
      setenv(name.c_str(), value.c_str(), 1);
      sets_queues = sets_queues || name == queues;
    }
    const bool late = sets_queues && cuda_was_in_use();
    if (late) {
      log_message(LogLevel::warn,
                  fmt::format("CUDA was in use before Tandem could set {}={}, which it reads once: "
                              "calls are enqueued step by step, not as CUDA graphs; set it before",
                              queues, kHardwareQueues));
    }
    graphs_fit = environment.graphs && !late;
  });
}

}  // namespace

bool gpu::replays_graphs() {
  return env().graphs && graphs_fit;
}

int gpu_count() {
  configure();
  const BlockedSignals blocked;  // CUDA, which begins here, starts threads
  int count = 0;
  return cudaGetDeviceCount(&count) == cudaSuccess ? count : 0;
}

namespace gpu {

int require_gpus(const WorldOptions& options) {
  refuse_multicast(std::getenv);
  const int gpus = gpu_count();
  if (options.link && options.ranks_per_gpu == 1) {
    throw InvalidArgument("nccl: an emulated link: expected one only between ranks of one GPU");
  }
  if (gpus == 0) {
    throw Unsupported(std::string("nccl transport: no GPU: ") +
                      cudaGetErrorString(cudaGetLastError()));
  }
  return gpus;
}

const char* users_nvls() {
  configure();
  return nvls_before ? nvls_before->c_str() : nullptr;
}

void check_sharing(const WorldOptions& options) {
  if (options.ranks_per_gpu < 1 || options.ranks_per_gpu > kMaxSharing) {
    throw InvalidArgument(fmt::format("one_gpu: {} ranks a GPU: expected 1 to {}",
                                      options.ranks_per_gpu, kMaxSharing));
  }
  if (launched_by_mpi() || launched_by_environment()) {
    throw Unsupported(
        fmt::format("one_gpu: {} ranks a GPU: expected ranks that are threads of one "
                    "process, not those of a launcher",
                    options.ranks_per_gpu));
  }
  if (options.ranks > options.ranks_per_gpu) {
    throw InvalidArgument(fmt::format("one_gpu: {} ranks, {} a GPU: expected all on one GPU",
                                      options.ranks, options.ranks_per_gpu));
  }
  if (options.link) check_link_pacer(*options.link);
}

void share_with_processes(const WorldOptions& options, int ranks) {
  if (ranks > options.ranks_per_gpu || ranks > kMaxGpus) {
    throw InvalidArgument(
        fmt::format("nccl: {} ranks, {} a GPU: expected all on one GPU, and at most {} processes",
                    ranks, options.ranks_per_gpu, kMaxGpus));
  }
  static std::once_flag once;
  std::call_once(once, [] {
    setenv("NCCL_HOSTID", fmt::format("{} process {}", this_node(), getpid()).c_str(), 1);
    setenv("NCCL_MNNVL_ENABLE", "0", 1);  // it would find out that nodes have the same GPU
  });
  check(cudaSetDevice(0), "cudaSetDevice");
}

void check_ranks(const WorldOptions& options, int gpus) {
  if (options.ranks <= gpus) return;
  throw InvalidArgument(
      fmt::format("nccl: {} ranks: this machine has {} GPUs", options.ranks, gpus));
}

void use_gpu_of(int rank, int local_rank, int gpus) {
  // A launcher may have assigned a GPU to each of its processes, as srun --gpus-per-task=1 does.
  const int device = gpus == 1 ? 0 : local_rank;
  if (device >= gpus) {
    throw InvalidArgument(fmt::format("nccl: rank {}, number {} of its host: it has {} GPU{}", rank,
                                      device, gpus, gpus == 1 ? "" : "s"));
  }
  check(cudaSetDevice(device), "cudaSetDevice");
}

WorldOptions control_options(const WorldOptions& options) {
  WorldOptions of_threads = options;
  of_threads.link.reset();
  return of_threads;
}

}  // namespace gpu
}  // namespace tandem
