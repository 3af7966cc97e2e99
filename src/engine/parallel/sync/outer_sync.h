// Learners that train apart: every few steps a learner sends what its weights have changed since
// the last exchange, and all make the same outer step with the learners' mean change (DiLoCo, arXiv
// 2311.08105, algorithm 1):
//
//   v = momentum x v + mean(anchor - w),  anchor -= lr x v,  w = anchor
//
// or with Nesterov's momentum anchor -= lr x (mean + momentum x v). Each owner of a shard exchanges
// it with the owners of the same shard in the other learners, so nothing is gathered first. With a
// delay the steps go on meanwhile, and w = mix x w + (1 - mix) x anchor when the messages of all
// are here (Streaming DiLoCo, arXiv 2501.18512, section 2.3). Anchors and momenta are bitwise equal
// in all learners.
//
// With a quorum the mean is over the learners whose messages count (learner_messages.h). One whose
// message does not takes the mean all the same, and adds what it has sent to its next message.
//
// With method demo every step exchanges the largest cosines of its gradients
// (engine/parallel/sync/demo.h); the update has only decayed the weights, and w -= lr x their
// signs.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "engine/parallel/sharded/sharded_optimizer.h"
#include "engine/parallel/sync/exchange.h"
#include "engine/parallel/sync/fragments.h"
#include "engine/parallel/sync/learner_messages.h"
#include "tandem/communicator.h"

namespace tandem {

/// Moments that an owner has for the exchanges.
std::vector<Moment> outer_moments(const SyncConfig& config);

/// Bytes that an owner of fragments allocates for exchanges, next to the moments.
struct ExchangeBytes {
  double changes = 0;   ///< of the largest fragment, with those not sent
  double scratch = 0;   ///< in which they are encoded and combined
  double messages = 0;  ///< of all learners
  double total() const { return changes + scratch + messages; }
};
ExchangeBytes exchange_bytes(const SyncConfig& config, std::span<const SyncShard> fragments);

class OuterSync {
 public:
  /// Learners whose messages of a fragment that was sent after `step` count as late, the same in
  /// all learners: for tests. With this function no message is late by its time.
  using LateLearners = std::function<std::vector<int>(int64_t step)>;
  /// A pipeline stage on this rank: `list` as of Stage::parameter_list, with the optimizer's
  /// patterns.
  struct Stage {
    Exec exec;  ///< of its passes
    ShardedOptimizer& optimizer;
    std::vector<Parameter> list;

    /// Streams that read or write the owners' state.
    std::vector<Exec> execs() const;
  };
  /// `learners`: the ranks with the same place in each learner. `step`: finished ones; after none
  /// the anchors become the weights, and an exchange that runs is begun again with what was sent.
  /// Collective.
  OuterSync(Communicator& learners, const SyncConfig& config, std::vector<Stage> stages,
            int64_t step, LateLearners late = {});

  /// Whether `after_update` of this step sends a fragment, which reads the owners' slices, and
  /// whether it applies one, which changes them. The same on every rank.
  bool sends(int64_t step) const { return fragment_due(config_, step).has_value(); }
  bool applies(int64_t step) const { return sends(step - config_.delay); }
  /// After the update of `step`: sends the fragment that is due, and applies one whose delay is
  /// over, for which it waits for all learners. Slices that it reads must be updated, and before it
  /// changes them all weights awaited. Returns whether it has. `lr`: of the update. Throws Timeout
  /// or Aborted. Collective.
  bool after_update(int64_t step, double lr);
  /// Learners whose messages counted in the last fragment applied, in order; none where this rank
  /// has nothing of it.
  const std::vector<int>& counted() const { return counted_; }
  /// Sets the anchors to the mean of the learners' weights after `step`, the run's last, unless an
  /// exchange has just made these equal. Training must not go on after it. Weights must be updated.
  /// Collective.
  void average_weights(int64_t step);
  /// Bytes sent by this rank since the last call.
  uint64_t take_sent() { return messages_->take_sent(); }
  /// Bytes that this rank has allocated, next to the moments.
  size_t bytes() const {
    return changes_.bytes() + unsent_.bytes() + exchange_->bytes() + messages_->bytes();
  }

 private:
  /// Elements in this rank's memory, in the order of the shard.
  struct Values {
    Tensor weights, anchor, momentum, sent, unsent, gradients;  // f32; the last four may be empty
    float lr_scale = 1;
  };
  struct Fragment {
    SyncShard shard;
    std::vector<Values> values;
  };
  void add_stage(const Stage& stage);
  void begin_again(const SentFragment& sent);
  void send(int fragment);
  size_t encode(const Fragment& fragment, std::byte* message);
  void keep_sent(const Fragment& fragment, const std::byte* message);
  bool is_sent_whole(const SyncSlice& slice) const;
  void add_unsent(const Fragment& fragment);
  void settle_unsent(const Fragment& fragment, bool counts);
  void receive(int fragment, int64_t sent_after);
  void apply(const Fragment& fragment);
  void apply_signs(const Fragment& fragment);
  void find_changes(const Fragment& fragment);
  void await_steps();
  void let_steps_await();
  Tensor changes_of(const Fragment& fragment) const;
  static Tensor slice_of(const Fragment& fragment, size_t index, const Tensor& values);
  void load(const Fragment& fragment, Tensor Values::*from, const Tensor& to) const;
  void store(const Fragment& fragment, const Tensor& from, Tensor Values::*to) const;

  std::unique_ptr<Communicator> learners_;  // not while `messages_` sends in steps
  const Exec exec_;
  const SyncConfig config_;
  const LateLearners late_;
  const std::vector<Stage> stages_;
  std::unique_ptr<Exchange> exchange_;
  std::vector<Fragment> fragments_;
  Fence fence_;
  Memory changes_;  // of a fragment: this learner's, then the mean
  Memory unsent_;   // of a fragment that is encoded, if messages are sparse
  std::optional<LearnerMessages> messages_;
  std::vector<int> counted_;
  bool has_mean_ = false;
  double lr_ = 0;  // of the last update
};

}  // namespace tandem
