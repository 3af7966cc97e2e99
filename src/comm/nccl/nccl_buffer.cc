#include "comm/nccl/nccl_buffer.h"

#include <fmt/format.h>

#include "comm/nccl/nccl_communicator.h"

namespace tandem::gpu {
namespace {

// False if GPUs cannot map each other's memory: NCCL's window is then a host address.
bool is_on_device(ncclWindow_t window) {
  cudaPointerAttributes attributes{};
  check(cudaPointerGetAttributes(&attributes, window), "an NCCL window");
  return attributes.type == cudaMemoryTypeDevice;
}

}  // namespace

NcclMemory::~NcclMemory() {
  if (window_ && *comm_) ncclCommWindowDeregister(*comm_, window_);
  if (local_) ncclMemFree(local_);
}

size_t NcclMemory::pages(size_t bytes) {
  const size_t page = NCCL_WIN_REQUIRED_ALIGNMENT;
  return (bytes + page) / page * page;
}

void NcclMemory::obtain(size_t total, cudaStream_t stream) {
  void* memory = nullptr;
  check(ncclMemAlloc(&memory, total), fmt::format("ncclMemAlloc of {} bytes", total).c_str());
  local_ = static_cast<std::byte*>(memory);
  check(cudaMemsetAsync(memory, 0, total, stream), "clear symmetric memory");
  check(cudaStreamSynchronize(stream), "clear symmetric memory");
}

void NcclMemory::map(size_t total, LsaAddresses& addresses, int ranks, cudaStream_t stream) {
  check(ncclCommWindowRegister(*comm_, local_, total, &window_, NCCL_WIN_COLL_SYMMETRIC),
        "ncclCommWindowRegister");
  if (!window_ || !is_on_device(window_)) {
    throw Unsupported("nccl: symmetric windows: this machine's GPUs cannot map each other");
  }
  launch_lsa_pointers(window_, ranks, &addresses, stream);
  check(cudaStreamSynchronize(stream), "addresses of a window");
}

}  // namespace tandem::gpu
