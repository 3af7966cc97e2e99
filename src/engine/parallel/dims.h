// Parallel dimensions of a run: the only place where ranks are computed from coordinates.
//
// World rank = tp + tp size x dp: a tensor-parallel group is contiguous. Experts are sharded inside
// data parallelism, as in Megatron-Core: dp = ep + ep size x expert_dp, so that the ranks that
// share the experts, EP x TP, are contiguous, too.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "engine/config/config.h"
#include "tandem/communicator.h"

namespace tandem {

/// Ranks that differ in one coordinate, or in the two of `experts` (EP x TP, TP index fastest).
enum class Axis : uint8_t { tp, dp, experts, expert_dp };

class ParallelDims {
 public:
  /// Throws InvalidArgument for a size below 1, or if `ep` does not divide `dp`.
  ParallelDims(int tp, int dp, int ep = 1);
  /// parallel.tp, parallel.dp and parallel.ep.
  explicit ParallelDims(const TrainConfig& config);

  int tp() const { return tp_; }
  int dp() const { return dp_; }
  int ep() const { return ep_; }
  int ranks() const { return tp_ * dp_; }

  struct Coordinates {
    int tp = 0, dp = 0, ep = 0, expert_dp = 0;
    bool operator==(const Coordinates&) const = default;
  };
  Coordinates coordinates(int rank) const;
  /// Size of a group along the axis.
  int size(Axis axis) const;
  /// Index of the rank's group among those of the axis, and its index in the group.
  int group(Axis axis, int rank) const;
  int index(Axis axis, int rank) const;
  /// Samples of a replica, of `batch` in a step.
  int64_t local_batch(int64_t batch) const { return batch / dp_; }
  /// "tp 2 dp 4 ep 2"
  std::string describe() const;

 private:
  int tp_, dp_, ep_;
};

/// A rank's communicators.
class ParallelGroups {
 public:
  /// Throws InvalidArgument unless the world has dims.ranks() ranks. `with_experts`: also the
  /// groups of the experts. Collective.
  ParallelGroups(Communicator& world, const ParallelDims& dims, bool with_experts);

  const ParallelDims& dims() const { return dims_; }
  Communicator& world() const { return world_; }
  Communicator& tp() const { return *tp_; }
  Communicator& dp() const { return *dp_; }
  /// nullptr without experts.
  Communicator* experts() const { return experts_.get(); }
  Communicator* expert_dp() const { return expert_dp_.get(); }
  /// Communicators whose ranks together are the world: a sum along each in turn is over the world.
  std::vector<Communicator*> world_axes() const { return {tp_.get(), dp_.get()}; }

 private:
  std::unique_ptr<Communicator> split(Axis axis) const;

  Communicator& world_;
  ParallelDims dims_;
  std::unique_ptr<Communicator> tp_, dp_, experts_, expert_dp_;
};

}  // namespace tandem
