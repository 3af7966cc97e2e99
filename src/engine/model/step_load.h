// Expert load of a stage's passes, by microbatch or over a step, and the auxiliary losses of it.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "engine/model/microbatch.h"
#include "engine/model/weights.h"

namespace tandem {

class StepLoad {
 public:
  /// The stage's model has experts. `axes`: communicators along which counts are summed in turn.
  StepLoad(ModelContext& context, std::vector<Communicator*> axes);

  /// Losses and loads of a step, as in stage.h.
  void begin_step(int64_t aux_losses);
  void share();
  double aux_loss() const;
  ExpertCounts counts() const;
  void adjust_router_bias();

  /// Before a microbatch's forward pass: sets what it counts into.
  void begin(MicrobatchState& microbatch);
  /// Before its backward pass: sums its counts over the ranks if the auxiliary loss needs them, and
  /// adds them to those of the step.
  void end(CountedLoad& counted);
  /// Gradient of the auxiliary loss by a router's mean probabilities; without data if there is no
  /// such loss.
  Tensor balance(const MicrobatchState& microbatch, const BranchLayout& branch) const;

 private:
  std::shared_ptr<CountedLoad> make_load() const;
  AuxLoss layer_loss(int64_t losses) const;
  double read(const Tensor& number) const;
  bool covers_step() const { return of_step_ && aux_losses_ == 1; }
  static void share(CountedLoad& counted);

  ModelContext& context_;
  std::vector<Communicator*> axes_;
  /// Counts that are reported: the step's, once one has begun, or those of the last forward pass.
  std::shared_ptr<CountedLoad> reported_, of_step_;
  int64_t aux_losses_ = 1;          // of a step
  Memory aux_loss_sum_, aux_loss_;  // doubles: the sum of a step's, and the last one read
  Memory balance_;
};

}  // namespace tandem
