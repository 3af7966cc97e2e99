// Weights and optimizer state of a run on one rank, as checkpoints are written from them and read
// into them.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "engine/model/stage.h"
#include "engine/parallel/sharded/sharded_optimizer.h"

namespace tandem {

/// A pipeline stage, or the whole model, and its optimizer.
struct TrainedStage {
  Stage& model;
  ShardedOptimizer& optimizer;
};

struct TrainedRanks {
  Communicator& world;
  std::string layout;  ///< residuals are reused only if it is the same
  Communicator& tp;
  std::vector<TrainedStage> stages;  ///< of this rank
  int learner = 0, learners = 1;     ///< this rank's, and their number
  std::vector<Moment> outer = {};    ///< moments of several learners (outer_moments)
  /// Approximate size of a checkpoint.
  uint64_t bytes() const;
  /// All parameters of the model; which are on this rank and where differs between its stages.
  const std::vector<Parameter>& parameter_list() const;
  bool has_masters() const;
  bool has_outer(Moment moment) const { return std::ranges::find(outer, moment) != outer.end(); }
};

/// State that this rank owns: all ranks together have each element once.
class OwnedState {
 public:
  virtual ~OwnedState() = default;
  /// `begin`: first element in the stage's flat array; `values`: f32 on the host, valid
  /// during the call.
  using Visit = std::function<void(int64_t begin, const Tensor& values)>;
  /// Calls `visit` for all owned elements of a stage.
  virtual void for_each(size_t stage, Moment moment, const Visit& visit) const = 0;
  /// Error feedback residuals of this rank's next gradients, in the order of stages and groups.
  virtual std::vector<Tensor> residuals() const = 0;
};

/// The state that is trained, which must not change meanwhile.
class LiveState : public OwnedState {
 public:
  explicit LiveState(const TrainedRanks& ranks) : ranks_(ranks) {}
  void for_each(size_t stage, Moment moment, const Visit& visit) const override;
  std::vector<Tensor> residuals() const override;

 private:
  const TrainedRanks& ranks_;
};

}  // namespace tandem
