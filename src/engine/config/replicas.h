// Logical replicas of a run (parallel.replicas): each has its share of a batch and one sum of
// gradients, whatever the number of data-parallel ranks. A rank may run several of them in turn.
#pragma once

#include <cstdint>

#include "engine/config/config.h"

namespace tandem {

/// parallel.replicas, or parallel.dp if that is 0.
inline int64_t logical_replicas(const TrainConfig& config) {
  return config.parallel.replicas > 0 ? config.parallel.replicas : config.parallel.dp;
}

/// Data-parallel ranks that divide the optimizer state: parallel.dp_shard, all if it is 0, and one
/// with parallel.zero = 0.
inline int64_t state_shards(const TrainConfig& config) {
  const auto& parallel = config.parallel;
  if (parallel.zero == 0) return 1;
  return parallel.dp_shard > 0 ? parallel.dp_shard : parallel.dp;
}

/// Whether every data-parallel rank has all optimizer state, and reduced gradients are gathered.
inline bool replicates_state(const TrainConfig& config) {
  return config.parallel.zero == 0 || (config.parallel.dp_shard == 1 && config.parallel.dp > 1);
}

/// Key that the number of replicas is from.
inline const char* replicas_key(const TrainConfig& config) {
  return config.parallel.replicas > config.parallel.dp ? "parallel.replicas" : "parallel.dp";
}
/// Throws ConfigError if there are fewer replicas than ranks, if ranks cannot run several with the
/// bits of one rank each, or if other keys contradict parallel.zero = 0 or
/// parallel.dp_shard.
void check_replicas(const TrainConfig& config);

}  // namespace tandem
