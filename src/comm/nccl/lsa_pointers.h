// The peers' addresses of a registered window. NCCL gives them to kernels only.
#pragma once

#include <cuda_runtime_api.h>
#include <nccl.h>

#include <cstddef>

namespace tandem::gpu {

/// addresses[r] = rank r's copy of `window` as this GPU reaches it. Blocks.
void read_lsa_pointers(ncclWindow_t window, int ranks, std::byte** addresses);

}  // namespace tandem::gpu
