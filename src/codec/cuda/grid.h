// Launch configuration of kernels over the blocks of a message.
#pragma once

#include <algorithm>

#include "codec/cuda/wire_params.h"
#include "core/cuda/share.h"

namespace tandem::gpu {

constexpr int kCodecThreads = 256;

/// Grid size for kernels with `per_sm` resident thread blocks per SM. For large messages a thread
/// block has four rounds, so that a slow SM takes fewer blocks.
inline unsigned codec_grid(int64_t blocks, int per_sm) {
  const int64_t all = (blocks * kQuad + kCodecThreads - 1) / kCodecThreads;
  const int64_t resident = int64_t(this_share()->sms()) * per_sm;
  return unsigned(std::max(std::min(all, resident), all / 4));
}

}  // namespace tandem::gpu
