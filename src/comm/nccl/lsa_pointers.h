// Peers' addresses of a registered window, which NCCL gives only to kernels.
#pragma once

#include <cuda_runtime_api.h>
#include <nccl.h>

#include <cstddef>

#include "comm/device/device_signal.h"

namespace tandem::gpu {

/// Addresses by rank, in host memory that kernels write.
struct LsaAddresses {
  std::byte* of[kMaxGpus] = {};
};

/// Number of ranks on `comm` whose memory this rank reaches through a window, including itself.
int lsa_team_size(ncclComm_t comm);

/// Enqueues addresses->of[r] = rank r's copy of `window` as this GPU reaches it. All `ranks` are in
/// the window's team.
void launch_lsa_pointers(ncclWindow_t window, int ranks, LsaAddresses* addresses,
                         cudaStream_t stream);

}  // namespace tandem::gpu
