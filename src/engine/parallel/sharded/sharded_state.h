// Optimizer state of one rank: both moments of its shards of the weights and, if ranks do not hold
// these in f32 or send weight differences, the owners' f32 master weights (ZeRO, arXiv 1910.02054).
// Ranks may hold the same state; one of them then owns each shard.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <vector>

#include "core/exec.h"
#include "engine/model/weights.h"
#include "engine/parallel/sharded/buckets.h"

namespace tandem {

/// The owners' weights, both moments, and master weights if those of all ranks are sums of decoded
/// differences. Of learners also the weights and the momentum of their last exchange, what this one
/// has sent in the exchange that runs, and what all its messages have left out
/// (engine/parallel/sync/outer_sync.h).
enum class Moment : uint8_t {
  weights,
  first,
  second,
  master,
  anchor,
  outer_momentum,
  sent,
  unsent
};
constexpr Moment kAllMoments[] = {Moment::weights, Moment::first,  Moment::second,
                                  Moment::master,  Moment::anchor, Moment::outer_momentum,
                                  Moment::sent,    Moment::unsent};

/// Contiguous elements of a rank's flat array.
struct StateSlice {
  int64_t begin = 0;
  Tensor values;  ///< f32 [elements] on the rank's device; writable
};

class ShardedState {
 public:
  /// `weights`: [elements] on exec's device; must outlive this object. The rank holds the state of
  /// `rank` of `buckets`, of which it owns `owned`. `runs`: of all ranks. `outer`: moments of
  /// learners, zero at first.
  ShardedState(const Exec& exec, const WeightViews& weights, const Buckets& buckets, int rank,
               Shard owned, std::span<const ParameterRun> runs, bool sends_differences,
               std::span<const Moment> outer);

  /// Whether the weights of all ranks are sums of decoded differences.
  bool sends_differences() const { return sends_differences_; }
  /// Copies weights, f32 [elements], to the masters.
  void adopt_weights(const Tensor& values);

  /// Elements of uniform properties in one bucket of this rank.
  struct Run {
    ParameterRun run;  ///< in the flat array
    int shard = 0;     ///< in the shard of one logical replica
    Tensor updated;    ///< weights that the optimizer updates
    Tensor first, second;
    int64_t slot = 0;  ///< first element among those of the rank's state
  };
  std::span<const Run> runs(int bucket) const;
  /// Values of a moment of learners; without data if it is not there.
  Tensor outer(Moment moment, const Run& run) const;
  bool owns(const Run& run) const {
    return run.shard >= owned_.begin && run.shard < owned_.begin + owned_.count;
  }
  /// Master weights of this rank's shard of a bucket, if ranks send differences.
  Tensor masters(int bucket) const;

  /// State owned by this rank, without padding: all ranks together cover each element once
  /// (`master` only if sends_differences(), those of learners only if they are there). `all`: all
  /// state that it holds.
  std::vector<StateSlice> slices(Moment moment, bool all = false) const;
  size_t bytes() const { return (2 + outer_.size()) * first_.bytes() + master_.bytes(); }

 private:
  Exec exec_;
  WeightViews weights_;
  Buckets buckets_;
  int rank_;
  Shard owned_;
  bool sends_differences_;
  std::vector<int64_t> slots_;      // by bucket: first element of its shard
  Memory first_, second_, master_;  // by slot, as the next
  std::map<Moment, Memory> outer_;
  std::vector<Run> runs_;       // by bucket
  std::vector<size_t> begins_;  // of each bucket's runs
};

}  // namespace tandem
