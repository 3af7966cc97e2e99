// Parallel dimensions of a run: the only place where ranks are computed from coordinates.
//
// A rank has a coordinate on each axis, and a group is the ranks that differ only on some of them.
// The first axis varies fastest, so a tensor-parallel group is contiguous. The cp ranks of a
// context-parallel group compute rows of the same sequences (schedule/context.h); parameters are
// copied over them as over data-parallel ranks, and gradients summed over both. Experts are sharded
// inside data parallelism, as in Megatron-Core: data parallelism is the axes ep and expert_dp
// together; experts are copied over cp. Pipeline stages come next: each is the tp x cp x dp ranks
// of a contiguous range of a learner. Learners, which train
// apart (engine/parallel/sync/config.h), are outermost; all else here is of one of them.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "engine/model/axes.h"
#include "engine/parallel/config.h"
#include "engine/train/config.h"
#include "tandem/communicator.h"

namespace tandem {

class ParallelDims {
 public:
  /// Throws InvalidArgument for a size below 1, or if `ep` does not divide `dp`.
  ParallelDims(int tp, int dp, int ep = 1, int pp = 1, int learners = 1, int cp = 1);
  explicit ParallelDims(const ParallelConfig& parallel);

  int tp() const { return size(kTp); }
  int cp() const { return size(kCp); }
  int dp() const { return size(kDp); }
  int ep() const { return size({Axis::ep}); }
  int pp() const { return size(kPp); }
  int learners() const { return size(kSync); }
  int learner(int rank) const { return index(kSync, rank); }
  int ranks() const;  ///< of all learners
  /// Ranks of a stage that have copies of a parameter, unless it is an expert's.
  int copies() const { return size(kCopies); }
  /// Logical replicas, at least dp().
  int replicas() const { return replicas_; }
  /// Ranks, of copies(), that divide the optimizer state; groups of as many consecutive ones have
  /// copies of it.
  int state_shards() const { return state_shards_; }
  /// Consecutive ranks, of copies(), whose gradients are summed first; copies() if all are at once.
  int host_copies() const { return host_copies_; }
  /// Gradients of a step that are summed: each logical replica has one of each of its cp ranks.
  int num_gradients() const { return replicas_ * cp(); }
  /// Rounds of a step: in round r data-parallel rank i runs logical replica r x dp + i, if there is
  /// one.
  int rounds() const { return (replicas_ + dp() - 1) / dp(); }
  /// Logical replica of the rank in a round, or -1.
  int replica(int round, int rank) const;
  /// Gradients of the parameters that this rank's group along `axes` has copies of, kCopies or
  /// kExpertCopies, in the order in which they are summed: of logical replica i and index j over
  /// cp, i x cp + j.
  std::vector<int> gradients(Axes axes, int rank) const;

  /// Ranks of a group.
  int size(Axes axes) const;
  /// Number of the rank's group among those of the axes, and its index in the group, both in rank
  /// order.
  int group(Axes axes, int rank) const;
  int index(Axes axes, int rank) const;
  /// Rank with that index of that group.
  int rank_of(Axes axes, int group, int index) const;
  /// Ranks of the rank's group, by index.
  std::vector<int> members(Axes axes, int rank) const;
  /// Samples of a logical replica, of `batch` in a step.
  int64_t local_batch(int64_t batch) const { return batch / (replicas_ * learners()); }
  /// Position of a step's sample in the order of microbatches, each with its samples of all
  /// replicas of a learner in turn, and the sample at a position. `microbatch`: samples of a
  /// replica in one.
  int64_t microbatch_position(int64_t batch, int64_t microbatch, int64_t sample) const;
  int64_t sample_at(int64_t batch, int64_t microbatch, int64_t position) const;
  /// "tp 2 dp 4 ep 2", and " cp 2", " pp 2" and " in 4 learners" if there are several
  std::string describe() const;

 private:
  /// Position of the rank among all combinations of coordinates on these axes, or on the others.
  int position(Axes axes, bool on_other_axes, int rank) const;

  std::array<int, kNumAxes> sizes_;
  int replicas_, state_shards_, host_copies_;
};

/// "tp x dp x pp = 2 x 1 x 1", and cp if there are several.
std::string describe_product(int64_t tp, int64_t cp, int64_t dp, int64_t pp);

/// Samples of a microbatch: train.microbatch, or all of a logical replica.
int64_t microbatch_size(const ParallelConfig& parallel, const RunConfig& train);

/// Tokens of a microbatch on the rank that has most: its rows of whole sequences, before they are
/// divided among tensor-parallel ranks.
int64_t microbatch_tokens(const ParallelConfig& parallel, const RunConfig& train);

/// A rank's communicators.
class ParallelGroups {
 public:
  /// Throws InvalidArgument unless the world has dims.ranks() ranks. `with_experts`: also the
  /// groups of the experts. Collective; CPU ranks do not wait for others (comm/group.h).
  ParallelGroups(Communicator& world, const ParallelDims& dims, bool with_experts);

  const ParallelDims& dims() const { return dims_; }
  Communicator& world() const { return world_; }
  bool on_gpus() const;
  Communicator& tp() const { return *tp_; }
  /// nullptr without context parallelism.
  Communicator* cp() const { return cp_.get(); }
  Communicator& copies() const { return *copies_; }
  /// nullptr without experts.
  Communicator* experts() const { return experts_.get(); }
  Communicator* expert_copies() const { return expert_copies_.get(); }
  /// Consecutive ranks of `along(axes)`, kCopies or kExpertCopies, and those with the same index
  /// among these; nullptr if all ranks are one group.
  struct SplitGroups {
    Communicator *group = nullptr, *across = nullptr;
  };
  /// Groups divide the optimizer state, of which there are copies.
  SplitGroups state_groups(Axes axes) const { return view(axes, state_groups_); }
  /// Gradients are summed within a group first.
  SplitGroups host_groups(Axes axes) const { return view(axes, host_groups_); }
  /// Communicator along `axes` (kTp, kCp, kCopies, kExpertCopies, …), or nullptr.
  Communicator* along(Axes axes) const;
  /// nullptr without pipeline stages.
  Communicator* pp() const { return pp_.get(); }
  /// Ranks with the same place in each learner; nullptr if there is one.
  Communicator* sync() const { return sync_.get(); }
  /// Communicators whose ranks together are the pipeline stage: a sum along each in turn is over
  /// it.
  std::vector<Communicator*> stage_axes() const { return {tp_.get(), copies_.get()}; }
  /// Communicators that together reach all ranks of the learner.
  std::vector<Communicator*> learner_axes() const;
  /// Communicators that together reach all ranks of the world.
  std::vector<Communicator*> world_axes() const;

 private:
  std::unique_ptr<Communicator> make(const char* name, Axes axes) const;

  Communicator& world_;
  ParallelDims dims_;
  std::unique_ptr<Communicator> tp_, cp_, copies_, pp_, sync_, experts_, expert_copies_;
  struct Split {
    std::unique_ptr<Communicator> group, across;
  };
  Split split(Communicator& ranks, int size) const;
  /// By kCopies and kExpertCopies.
  using Splits = std::array<Split, 2>;
  Splits split_all(int size) const;
  static SplitGroups view(Axes axes, const Splits& splits) {
    const Split& of = splits[axes == kCopies ? 0 : 1];
    return {of.group.get(), of.across.get()};
  }
  Splits state_groups_, host_groups_;
};

}  // namespace tandem
