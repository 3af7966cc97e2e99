#include "comm/nccl/ipc_memory.h"

namespace tandem::gpu {
namespace {

/// CUDA gives an allocation of such a size blocks of its own: handles name whole blocks.
constexpr size_t kBlock = size_t(2) << 20;

}  // namespace

// The driver keeps a rank's memory as long as a process maps it, as after the rank's death.
IpcMemory::~IpcMemory() {
  for (size_t rank = 0; rank < memory_.size(); ++rank) {
    if (memory_[rank] && int(rank) != rank_) cudaIpcCloseMemHandle(memory_[rank]);
  }
}

void IpcMemory::obtain(size_t total) {
  local_ = DeviceMemory((total + kBlock - 1) / kBlock * kBlock);
}

cudaIpcMemHandle_t IpcMemory::handle() const {
  cudaIpcMemHandle_t handle{};
  check(cudaIpcGetMemHandle(&handle, local_.data()), "cudaIpcGetMemHandle");
  return handle;
}

void IpcMemory::map(std::span<const cudaIpcMemHandle_t> handles, int rank) {
  rank_ = rank;
  memory_.resize(handles.size());
  for (size_t other = 0; other < handles.size(); ++other) {
    void* memory = local_.data();
    if (int(other) != rank) {
      check(cudaIpcOpenMemHandle(&memory, handles[other], cudaIpcMemLazyEnablePeerAccess),
            "cudaIpcOpenMemHandle");
    }
    memory_[other] = static_cast<std::byte*>(memory);
  }
}

}  // namespace tandem::gpu
