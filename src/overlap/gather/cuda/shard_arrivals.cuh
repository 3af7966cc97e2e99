// Wait of a kernel that reads shards as they arrive.
#pragma once

#include "gemm/cuda/wait_for_load.cuh"
#include "overlap/gather/cuda/shard_route.h"

namespace tandem::gpu::fused {

/// Signal value of an arrived chunk.
CUTLASS_DEVICE uint64_t wanted(ShardArrivals const& arrivals) {
  return (*const_cast<const volatile uint64_t*>(arrivals.epoch) + arrivals.ahead) *
         arrivals.counts_per_chunk;
}

}  // namespace tandem::gpu::fused
