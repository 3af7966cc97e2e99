// Table `parallel`: ranks of each axis, pipeline, and what is sent how.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "engine/parallel/sync/config.h"

namespace tandem {

template <class S>
struct Key;  // engine/config/section.h

struct ParallelConfig {
  int64_t tp = 1;
  int64_t cp = 1;
  int64_t dp = 1;        ///< of all learners
  int64_t replicas = 0;  ///< 0: dp
  int64_t dp_shard = 0;  ///< 0: dp
  int64_t dp_host = 0;   ///< 0: dp
  int64_t ep = 1;
  int64_t zero = 1;
  int64_t pp = 1;
  int64_t virtual_stages = 1;
  std::string schedule = "1f1b";          ///< a schedule::PipelineKind
  std::vector<int64_t> layers_per_stage;  ///< by stage; empty: equal shares
  double dp_bucket_mib = 0;               ///< 0: chosen (bucket_mib)
  std::string strategy = "automatic";
  int64_t chunks = 0;
  std::string link;
  std::string codec = "none";  ///< a CodecPolicy
  bool error_feedback = true;
  SyncConfig sync;  ///< a table of its own

  /// Data-parallel ranks of a learner.
  int64_t learner_dp() const { return dp / sync.num_learners(); }
  /// Ranks of a learner that have copies of parameters, and gradients that are summed.
  int64_t copies() const { return learner_dp() * cp; }
  const char* learner_dp_key() const {
    return sync.num_learners() > 1 ? "parallel.dp / sync.learners" : "parallel.dp";
  }
  /// Logical replicas: each has its share of a batch and one sum of gradients, whatever the number
  /// of data-parallel ranks. A rank may run several of them in turn.
  int64_t logical_replicas() const { return replicas > 0 ? replicas : dp; }
  /// Key that their number is from.
  const char* replicas_key() const { return replicas > dp ? "parallel.replicas" : "parallel.dp"; }
  /// Data-parallel ranks that divide the optimizer state: dp_shard, all of a learner if it is 0,
  /// and one with zero = 0.
  int64_t state_shards() const { return zero == 0 ? 1 : dp_shard > 0 ? dp_shard : learner_dp(); }
  /// Whether groups of consecutive replicas divide the state, or sum their gradients first: one
  /// group of all data-parallel ranks sums as no groups do, but not if more replicas had several.
  bool has_shard_groups() const { return dp_shard != 0 && dp_shard != learner_dp(); }
  bool has_host_groups() const {
    return dp_host != 0 && (dp_host != learner_dp() || replicas > dp);
  }
  /// Whether every data-parallel rank has all optimizer state, and reduced gradients are gathered.
  bool replicates_state() const { return zero == 0 || (dp_shard * cp == 1 && learner_dp() > 1); }

  static std::span<const Key<ParallelConfig>> keys();
  /// Throws ConfigError if keys contradict each other: sizes that do not divide, fewer replicas
  /// than ranks, or replicas that ranks cannot run in turn with the bits of one rank each.
  void check() const;
};

}  // namespace tandem
