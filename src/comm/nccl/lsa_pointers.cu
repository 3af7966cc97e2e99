#include "comm/nccl/lsa_pointers.h"

#include <nccl_device.h>

#include "comm/nccl/device_signal.h"
#include "core/cuda/handles.h"

namespace tandem::gpu {
namespace {

struct Addresses {
  std::byte* of[kMaxGpus] = {};
};

__global__ void lsa_pointers_kernel(ncclWindow_t window, int ranks, Addresses* addresses) {
  for (int r = 0; r < ranks; ++r) {
    addresses->of[r] = static_cast<std::byte*>(ncclGetLsaPointer(window, 0, r));
  }
}

}  // namespace

void read_lsa_pointers(ncclWindow_t window, int ranks, std::byte** addresses) {
  const Mapped<Addresses> result;
  lsa_pointers_kernel<<<1, 1>>>(window, ranks, result.get());
  check_launch("lsa_pointers_kernel");
  check(cudaDeviceSynchronize(), "lsa_pointers_kernel");
  for (int r = 0; r < ranks; ++r) addresses[r] = result.get()->of[r];
}

}  // namespace tandem::gpu
