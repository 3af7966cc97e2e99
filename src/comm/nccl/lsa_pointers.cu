#include "comm/nccl/lsa_pointers.h"

#include <nccl_device.h>

#include "core/cuda/check.h"
#include "core/cuda/load_module.cuh"

namespace tandem::gpu {
namespace {

__global__ void lsa_pointers_kernel(ncclWindow_t window, int ranks, LsaAddresses* addresses) {
  for (int r = 0; r < ranks; ++r) {
    addresses->of[r] = static_cast<std::byte*>(ncclGetLsaPointer(window, 0, r));
  }
}

}  // namespace

int lsa_team_size(ncclComm_t comm) {
  return ncclTeamLsa(comm).nRanks;
}

void launch_lsa_pointers(ncclWindow_t window, int ranks, LsaAddresses* addresses,
                         cudaStream_t stream) {
  lsa_pointers_kernel<<<1, 1, 0, stream>>>(window, ranks, addresses);
  check_launch("lsa_pointers_kernel");
}

}  // namespace tandem::gpu
