// Seeded values that fill.h writes, for kernels that regenerate them.
#pragma once

#include "tandem/random.h"

namespace tandem::gpu {

__device__ inline float uniform_value(uint64_t seed, uint64_t stream, int64_t index) {
  return 2 * uniform(seed, stream, uint64_t(index)) - 1;
}

__device__ inline float scale_value(uint64_t seed, uint64_t stream, int64_t index) {
  return 0.25f + uniform(seed, stream, uint64_t(index));
}

}  // namespace tandem::gpu
