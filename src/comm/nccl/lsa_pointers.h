// The peers' addresses of a registered window. NCCL gives them to kernels only.
#pragma once

#include <cuda_runtime_api.h>
#include <nccl.h>

#include <cstddef>

#include "comm/device/device_signal.h"

namespace tandem::gpu {

/// By rank, in host memory that kernels write.
struct LsaAddresses {
  std::byte* of[kMaxGpus] = {};
};

/// How many ranks there are on `comm` whose memory this one reaches through a window, itself
/// included.
int lsa_team_size(ncclComm_t comm);

/// addresses->of[r] = rank r's copy of `window` as this GPU reaches it, when `stream` has come this
/// far. All `ranks` are of the window's team.
void launch_lsa_pointers(ncclWindow_t window, int ranks, LsaAddresses* addresses,
                         cudaStream_t stream);

}  // namespace tandem::gpu
