// Hashes of the optimizer's state, from one update of it to the next: in between nothing writes it.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "engine/parallel/sharded/sharded_state.h"

namespace tandem {

/// Whether data at `position`, in [0, 1), are checked in a step: a share of all positions, which
/// moves by the golden ratio, so that all are checked equally often. The same on all ranks.
bool is_checked(double position, int64_t step, double share);

struct StateCheckOptions {
  double share = 0;  ///< of the state, checked from one step to the next; 0: no check
  /// Whether weights that tensor-parallel ranks replicate change outside of updates, too (routers'
  /// biases): they are left out.
  bool replicated_change = false;
};

class StateHashes {
 public:
  StateHashes(const ShardedState& state, int buckets, const StateCheckOptions& options);

  /// Begins an update, after which `store` is called for every bucket, with `step`, its number.
  void begin_update(int64_t step) { step_ = step; }
  /// Hashes a bucket if it is its turn, or forgets its hashes.
  void store(int bucket);
  /// Forgets all hashes: the state is about to be written.
  void forget();
  /// First elements, in the flat array, of the blocks of 4096 whose state has changed since.
  std::vector<int64_t> find_changed() const;

 private:
  std::vector<uint64_t> hash(int bucket) const;

  const ShardedState& state_;
  StateCheckOptions options_;
  int64_t step_ = 0;
  std::vector<std::vector<uint64_t>> hashes_;  // by bucket; empty: not checked
};

}  // namespace tandem
