#include "comm/world/gpus.h"

#include <cublasLt.h>

#include "comm/nccl/nccl_communicator.h"
#include "core/cuda/architecture.h"
#include "core/system/blocked_signals.h"
#include "tandem/cuda.h"

namespace tandem {

Gpus this_machines_gpus() {
  const BlockedSignals blocked;  // CUDA starts threads
  Gpus gpus;
  gpus.count = gpu_count();
  if (gpus.count == 0) {
    gpus.missing = std::string("no GPU: ") + cudaGetErrorString(cudaGetLastError());
    return gpus;
  }
  cudaDeviceProp properties{};
  gpu::check(cudaGetDeviceProperties(&properties, 0), "device properties");
  gpus.name = properties.name;
  gpus.memory_gib = double(properties.totalGlobalMem) / double(1ull << 30);
  for (int device = 0; device < gpus.count; ++device) {
    gpus.architectures.push_back(gpu::architecture_of(device));
  }
  gpus.architecture = gpus.architectures.front();
  gpu::check(cudaRuntimeGetVersion(&gpus.versions["cuda"]), "CUDA version");
  gpu::check(cudaDriverGetVersion(&gpus.versions["driver"]), "driver version");
  gpu::check(ncclGetVersion(&gpus.versions["nccl"]), "NCCL version");
  gpus.versions["cublaslt"] = int(cublasLtGetVersion());
  return gpus;
}

bool has_lost_gpu() {
  const cudaError_t state = cudaStreamQuery(cudaStreamLegacy);
  cudaGetLastError();
  return state != cudaSuccess && state != cudaErrorNotReady;
}

}  // namespace tandem
