// Data parallelism with sharded optimizer state (ZeRO stage 1): gradients are reduced to the owners
// of their shards (engine/parallel/sharded/gradient_sync.h), owners update (engine/optim/), and the
// updated weights are gathered (engine/parallel/sharded/weight_sync.h) under whatever runs before
// their use. With replicated state (ZeRO-0) the reduced gradients are gathered there, which makes
// an all-reduce of the same bits, and every rank updates all weights. Where groups of ranks have
// copies of the state (HSDP, arXiv 2304.11277), each shard is reduced in as many parts as there are
// copies, over all ranks; the parts are gathered among the copies as soon as they are reduced, and
// the weights within a group.
//
// Where ranks are on several hosts, gradients may be summed within each host first, then over the
// hosts, and weights are gathered the other way round: what a host sends to others does not depend
// on how many ranks it has. Sums are then those of hosts, in order, each over its ranks in order.
//
// One step is: `ready` calls during the last microbatch's backward, `reduce`, `update`, in this
// order on every rank, then `await` before weights are used. An optimizer with trust ratios
// sums the norms of all tensors over the ranks first. On a GPU, state is updated on the
// stream of the replicas' communicator, concurrently with the model's passes on its own.
#pragma once

#include <deque>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "engine/optim/optimizer.h"
#include "engine/optim/squares.h"
#include "engine/parallel/sharded/gradient_sync.h"
#include "engine/parallel/sharded/sharded_state.h"
#include "engine/parallel/sharded/state_hashes.h"
#include "engine/parallel/sharded/trust_ratios.h"
#include "engine/parallel/sharded/weight_sync.h"
#include "tandem/communicator.h"

namespace tandem {

struct ShardedOptimizerOptions {
  Wire gradients{}, weights{};
  bool error_feedback = true;  ///< for gradients
  /// GPUs: replicas communicate during the model's passes. Not if these wait for ranks in kernels
  /// that need all SMs.
  bool overlap = true;
  /// Gradients of groups that are a window are reduced after every backward pass, and owners have
  /// the sums (ZeRO-2); it is used instead of `gradients` below, and must outlive the optimizer.
  GradientMemory* gradient_memory = nullptr;
  Optimizer optimizer = find_optimizer("adamw");
  /// Communicators whose ranks together are the world: an optimizer with trust ratios sums norms
  /// over them.
  std::vector<Communicator*> norm_axes{};
  StateCheckOptions check{};    ///< CPU ranks
  std::vector<Moment> outer{};  ///< as of ShardedState
};

/// Parameters whose state is sharded over the ranks of one communicator.
struct ParameterGroup {
  Communicator& replicas;
  FlatRange range;                                   ///< of the flat arrays; groups do not overlap
  std::vector<Parameter> list;                       ///< with offsets in the flat arrays
  FlatWindow window = FlatWindow::all(range.count);  ///< of the range in the whole model's group
  /// Gradients are a window, which leaves after every pass, or after the last one of each logical
  /// replica.
  bool is_gradient_window = false;
  bool reduces_every_pass = true;
  /// Every rank has all state: reduced gradients are gathered instead of weights (ZeRO-0). Not with
  /// a window, trust ratios or a wire format of weights.
  bool replicates_state = false;
  /// Ranks of `replicas` that divide the state, and those that have the same shard of it; nullptr
  /// if all ranks divide it. Index in `replicas`: that in `copies` x the number of shards + that in
  /// `shards`.
  Communicator *shards = nullptr, *copies = nullptr;
  /// Ranks of `replicas` whose gradients are summed first, such as those of a host, and those with
  /// the same index in other hosts; nullptr if all are summed at once. Indices as above, and with
  /// the same sizes if both are used. CPU ranks without a wire format, a window or replicated
  /// state.
  Communicator *host = nullptr, *across_hosts = nullptr;
  /// Logical replicas that have a copy of the parameters, in order; one a rank if empty.
  std::vector<int> logical = {};
  /// Ranges of the flat arrays, ascending and apart, that have one owner each.
  std::vector<FlatRange> undivided = {};
};

class ShardedOptimizer {
 public:
  /// `weights`, `gradients`: [elements] on exec's device, read and written by work of exec, the
  /// gradients in f32 or, for AdamW without windows and wire formats, in bf16; must outlive this
  /// object. Weights that are not in f32 have their f32 masters
  /// here, at their owners only. Throws Unsupported for wire formats on several GPUs. Collective
  /// over the groups' communicators.
  ShardedOptimizer(const Exec& exec, const WeightViews& weights, const Tensor& gradients,
                   std::vector<ParameterGroup> groups, int64_t bucket_elements,
                   const ShardedOptimizerOptions& options = {});

  ShardedOptimizer(const ShardedOptimizer&) = delete;
  ShardedOptimizer& operator=(const ShardedOptimizer&) = delete;

  /// Copies weights, f32 [elements], to the owners' master weights; call after setting the weights.
  void adopt_weights(const Tensor& values);

  /// Reports that these gradients are final, or those of a pass if they are reduced after every
  /// pass; `range` lies in one group.
  void ready(FlatRange range);
  bool reduces_every_pass(FlatRange range) {
    const Group& group = find_group(range);
    return group.is_gradient_window && group.reduces_every_pass;
  }
  /// Instead of the passes of a logical replica if this rank has none in a round.
  void skip_pass();

  /// Completes the reduction. Returns the sum of squares over this rank's shards. Throws
  /// InvalidArgument unless all weights of the step before have been awaited.
  Squares reduce();
  /// Terms of the last reduction's sum: with those of other stages, terms of the whole model's.
  const std::vector<SquareTerm>& square_terms() const { return terms_; }
  /// Begins the optimizer on this rank's shards and the all-gather of the updated weights, which on
  /// CPU ranks leave from the next `progress` or `await` on. With trust ratios it overwrites the
  /// gradients, and is collective over norm_axes.
  void update(const AdamStep& step);
  /// Gathers the owners' weights, which were changed other than by `update`, as that does: all of
  /// the update before must have been awaited. Not if ranks send differences.
  void gather_weights();
  /// Streams on which `update` changes the state.
  std::vector<Exec> update_execs() const;
  /// Blocks until these weights, of one group, are updated. All ranks await the same ranges in the
  /// same order.
  void await(FlatRange range);
  void await_all();
  /// Returns once weights that were gathered have left, so that they may be changed other than by
  /// `update`. All must have been awaited.
  void flush();
  /// Returns once the state of this rank's shards, which `slices` are views of, is updated; weights
  /// are still to be awaited.
  void await_slices();
  /// CPU ranks: sends, sums and receives what is possible without waiting, as the calls above do,
  /// which may be far apart.
  void progress();

  /// Elements whose state the ranks of a communicator own together.
  struct StateGroup {
    Communicator& replicas;
    FlatRange range;
  };
  std::vector<StateGroup> state_groups();

  /// First elements of blocks of 4096 whose state differs from what the last update has left, in
  /// the share that is checked. Call after `reduce`.
  std::vector<int64_t> find_changed_state() const;
  /// Must be called after state was written other than by `update`.
  void state_changed();

  /// Slices of the ShardedState.
  std::vector<StateSlice> slices(Moment moment, bool all = false) const;
  /// Reduced gradients of the same elements, in their dtype, between `reduce` and the next backward
  /// pass.
  std::vector<StateSlice> reduced_gradients() const;
  /// Whether `slices` has Moment::master: the weights of all ranks are sums of decoded differences.
  bool has_masters() const;
  /// Error feedback residuals of this rank's next gradients, one a group, in the gradients' layout;
  /// empty without error feedback. Changed only by `update`: a step dropped before it leaves them
  /// unchanged.
  std::vector<Tensor> residuals();

  struct Sent {
    uint64_t gradients = 0, weights = 0;
    uint64_t uncompressed_gradients = 0;
    Sent operator+(const Sent& other) const {
      return {gradients + other.gradients, weights + other.weights,
              uncompressed_gradients + other.uncompressed_gradients};
    }
  };
  /// Bytes sent by this rank since the last call.
  Sent take_sent();

  /// Bytes of this rank's weights, gradients and optimizer state.
  size_t state_bytes() const;
  /// Bytes of the state, messages and residuals.
  size_t bytes() const;
  /// Elements of this rank's weights.
  int64_t elements() const;

 private:
  struct Group {
    Group(const Exec& exec, int index, const ParameterGroup& group, const WeightViews& all_weights,
          const GradientMemory& gradients, int64_t bucket_elements,
          const ShardedOptimizerOptions& options, size_t first_tensor);
    Buckets make_buckets(const ParameterGroup& group, int64_t bucket_elements) const;
    Buckets make_state_buckets(const ParameterGroup& group) const;
    /// Shards of the ranks with this one's index in other groups, and of those of its group.
    Buckets across_buckets() const {
      return with_owners(grid.by_group(grid.index(replicas.rank())));
    }
    Buckets group_buckets() const { return with_owners(grid.by_index()); }
    Buckets with_owners(std::vector<Shard> owned) const;
    void gather_copies();
    void finish_gradients();
    void on_reduced(int bucket);
    int add_terms(int index);
    void add_squares(int bucket);
    /// Calls apply(run, working copy) for the runs of each bucket before it is sent.
    void update(const char* name,
                std::function<void(const ShardedState::Run& run, const Tensor& working)> apply);
    /// Optimizer::find_direction of all slices, on a GPU enqueued and not waited for.
    void find_directions(const AdamStep& step);
    void add_norms(TrustRatios& ratios);
    FlatRange local(FlatRange range) const { return {range.begin - begin, range.count}; }

    Communicator& replicas;
    Communicator *host, *across_hosts;  // nullptr: one group
    RankGrid grid;                      // of hosts, or of ranks that divide the state
    Optimizer optimizer;
    Exec exec;                // of the replicas
    int64_t begin, elements;  // in the flat arrays; all below is relative to `begin`
    bool is_gradient_window, reduces_every_pass, replicates_state;
    std::vector<int> logical;
    size_t first_tensor;  // index of the group's first tensor among those of all groups
    WeightViews weights;
    Buckets buckets, state_buckets;
    ShardedState state;
    GradientSync gradient_sync;                // of the ranks with the same index in other hosts
    std::optional<GradientSync> host_sync;     // before it, within a host
    std::optional<WeightSync> copy_sync;       // of reduced gradients, among copies of the state
    std::optional<WeightSync> across_weights;  // before weight_sync, which is within a host
    WeightSync weight_sync;                    // ZeRO-0: of reduced gradients
    int num_reduced = 0;                       // buckets of this step
    std::vector<SquareTerm> terms;             // in the order of buckets
    std::vector<int> first_term;               // by bucket
    SquareSums squares;                        // by term, thus by owned run
    SquareSums norms;  // for trust ratios: by run of its weights, then of its directions
    std::optional<StateHashes> hashes;
  };
  Group& find_group(FlatRange range);

  Exec exec_;
  std::optional<GradientMemory> flat_gradients_;
  GradientMemory& gradients_;
  std::deque<Group> groups_;
  const Optimizer optimizer_;
  std::optional<TrustRatios> trust_ratios_;
  std::vector<SquareTerm> terms_;
  int64_t updates_ = 0;
};

}  // namespace tandem
