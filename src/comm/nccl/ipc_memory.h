// Symmetric memory of ranks that are processes and share one GPU: each rank's own allocation, which
// the others map (CUDA IPC).
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <span>
#include <vector>

#include "comm/device/gpu_communicator.h"

namespace tandem::gpu {

class IpcMemory final : public SymmetricMemory {
 public:
  IpcMemory() = default;
  ~IpcMemory() override;
  IpcMemory(const IpcMemory&) = delete;
  IpcMemory& operator=(const IpcMemory&) = delete;

  /// Allocates `total` zeroed bytes of this rank.
  void obtain(size_t total);
  /// Handle by which another process maps this rank's memory.
  cudaIpcMemHandle_t handle() const;
  /// Maps the memory of the other ranks, whose handles are `handles`.
  void map(std::span<const cudaIpcMemHandle_t> handles, int rank);
  std::byte* of(int rank) const { return memory_[size_t(rank)]; }

 private:
  DeviceMemory local_;
  int rank_ = 0;
  std::vector<std::byte*> memory_;
};

}  // namespace tandem::gpu
