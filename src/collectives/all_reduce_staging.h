// Staging memory of the GPU all-reduce kernels: two parities of one slot per rank for arrivals and
// as many for results.
#pragma once

#include <algorithm>
#include <cstdint>

namespace tandem {

/// Max bytes that one_shot has staging memory for. On 2 GPUs it is fastest up to this size; on 4
/// two exchanges of a shard are faster from 1 MiB up (docs/results/gpu-4xh200.md).
constexpr int64_t kOneShotBytes = int64_t(1) << 20;
/// Max bytes that one_shot and two_shot have staging memory for; larger tensors use the pipelined
/// kernel or NCCL.
constexpr int64_t kMaxStagedBytes = int64_t(32) << 20;

struct AllReduceStaging {
  int64_t capacity = 0;    ///< bytes of one tensor
  int64_t slot_bytes = 0;  ///< bytes of one rank's share of it

  constexpr int64_t bytes(int ranks) const { return slot_bytes * 4 * ranks; }
};

/// Sizes for tensors of up to `max_bytes`; `shard_bytes`: max bytes of one rank's whole rows, 0 if
/// shards need not be whole rows.
constexpr AllReduceStaging staging_for_up_to(int64_t max_bytes, int ranks, int64_t shard_bytes) {
  AllReduceStaging staging;
  staging.capacity = (std::min(max_bytes, kMaxStagedBytes) + 127) / 128 * 128;
  staging.slot_bytes = std::max((staging.capacity / ranks + 255) / 128 * 128,
                                std::min(staging.capacity, kOneShotBytes));
  if (max_bytes <= kMaxStagedBytes) {
    staging.slot_bytes = std::max(staging.slot_bytes, (shard_bytes + 127) / 128 * 128);
  }
  return staging;
}

/// Sizes for tensors of exactly `bytes`; empty if no kernel supports them.
constexpr AllReduceStaging staging_for(int64_t bytes, int ranks, int64_t shard_bytes) {
  if (ranks == 1 || bytes > kMaxStagedBytes) return {};
  return staging_for_up_to(bytes, ranks, shard_bytes);
}

}  // namespace tandem
