#include <cuda_runtime_api.h>
#include <fmt/format.h>

#include <cstdlib>
#include <mutex>

#include "comm/control/control_communicator.h"
#include "comm/control/launch.h"
#include "comm/nccl/nccl_communicator.h"
#include "tandem/cuda.h"

namespace tandem {
namespace {

void set(const char* name, const char* value) {
  setenv(name, value, 1);
}

// Before the first CUDA or NCCL call. NVLink multicast stays off: it needs rights over the whole
// node's switches that a library must not assume. Connections are made when a communicator is,
// since a lazy one would wait behind a kernel that waits for it.
void configure() {
  static std::once_flag once;
  std::call_once(once, [] {
    set("NCCL_NVLS_ENABLE", "0");
    set("NCCL_RUNTIME_CONNECT", "0");
    set("CUDA_DEVICE_MAX_CONNECTIONS", "32");
    set("CUDA_MODULE_LOADING", "EAGER");
  });
}

}  // namespace

int gpu_count() {
  configure();
  int count = 0;
  return cudaGetDeviceCount(&count) == cudaSuccess ? count : 0;
}

void run_gpus(const WorldOptions& options, const std::function<void(Communicator&)>& body) {
  const int gpus = gpu_count();
  if (options.link) throw InvalidArgument("nccl: an emulated link: expected none on GPUs");
  if (gpus == 0) {
    throw Unsupported(std::string("nccl transport: no GPU: ") +
                      cudaGetErrorString(cudaGetLastError()));
  }
  const auto on_device = [&](Communicator& control, int device) {
    if (device >= gpus) {
      throw InvalidArgument(fmt::format("nccl: rank {}, number {} of its host: it has {} GPU{}",
                                        control.rank(), device, gpus, gpus == 1 ? "" : "s"));
    }
    gpu::check(cudaSetDevice(device), "cudaSetDevice");
    gpu::NcclCommunicator comm(control, device);
    body(comm);
    comm.synchronize();
  };
  if (launched_by_mpi()) {
    return run_mpi(options, [&](Communicator& c) { on_device(c, local_rank(c.rank())); });
  }
  if (const auto launch = launched_by_environment()) {
    return run_control(*launch, options,
                       [&](Communicator& c) { on_device(c, launch->local_rank); });
  }
  if (options.ranks > gpus) {
    throw InvalidArgument(
        fmt::format("nccl: {} ranks: this machine has {} GPUs", options.ranks, gpus));
  }
  run_threads(options, [&](Communicator& c) { on_device(c, c.rank()); });
}

}  // namespace tandem
