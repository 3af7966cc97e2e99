// GPU ranks. A rank owns one GPU; its Communicator ("nccl") hands out symmetric device memory, and
// work is enqueued on the communicator's stream without waiting for it.
#pragma once

#include <functional>

#include "tandem/communicator.h"
#include "tandem/error.h"

namespace tandem {

/// A CUDA, cuBLASLt or NCCL call that failed.
class DeviceError : public Error {
 public:
  using Error::Error;
  int exit_code() const override { return 7; }
};

/// GPUs this process can use; 0 in a build without CUDA and on a machine without one.
int gpu_count();

/// Runs `body` once per rank, each on a GPU of its own: `options.ranks` threads of this process, or
/// the processes that mpirun, torchrun or srun started (one rank each; src/comm/control/launch.h
/// has the variables). Errors as `run_world`. NVLink multicast stays off. Throws Unsupported in a
/// build without CUDA or without a GPU, InvalidArgument for more ranks than GPUs or a link.
void run_gpus(const WorldOptions& options, const std::function<void(Communicator&)>& body);

}  // namespace tandem
