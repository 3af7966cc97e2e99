// Pipeline parallelism: runs the passes of a schedule (schedule/pipeline.h) on the stages of a rank
// and transfers activations and gradients between them.
//
// A stage puts its output into a slot of the next stage's rank, which is the memory of that stage's
// input until its backward pass; and its input's gradient into one of the rank before, in which
// that stage's backward pass works (stage_links.h). There are as many slots as messages can be sent
// and not acknowledged by the schedule, so a sender finds the slot's last message acknowledged.
//
// A tied embedding with its ends in two stages belongs to the last one (engine/model/stage.h). The
// first stage sends it the gradients of its lookups, which are added in the order of the whole
// model's backward passes, and receives the updated weights.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "engine/model/stage.h"
#include "engine/parallel/config.h"
#include "engine/parallel/pipeline_stage.h"
#include "engine/parallel/stage_links.h"
#include "engine/train/config.h"
#include "observe/phases.h"
#include "schedule/pipeline.h"
#include "tandem/communicator.h"

namespace tandem {

/// Schedule of a step; without pipeline parallelism each microbatch's passes in turn.
schedule::PipelineShape pipeline_shape(const ParallelConfig& parallel, const RunConfig& train);
/// Layers of every stage of a model with so many, in the order of the model.
std::vector<StageLayers> pipeline_layers(const ParallelConfig& parallel, int64_t num_layers);

class Pipeline {
 public:
  /// `pp`: the ranks of the shape; nullptr if it is one. It must outlive this object, and on GPUs
  /// be destroyed before the stages' stream. `stages`: this rank's chunks. `forward_runs`: whether
  /// `run_forward` is called, which overwrites outputs at once, so that copies are sent. `wire`:
  /// format of the messages between stages. Collective.
  Pipeline(Communicator* pp, const schedule::PipelineShape& shape,
           std::vector<std::unique_ptr<PipelineStage>> stages, bool forward_runs,
           const Wire& wire = {});

  /// Text of a step's microbatches.
  struct Batch {
    /// Called before the passes of a microbatch that need it; writes to the spans.
    std::function<void(int microbatch)> read;
    std::span<const int32_t> tokens, targets;
    std::span<const int32_t> document_starts =
        {};                    ///< empty, or as Stage::set_documents takes them
    bool has_padding = false;  ///< some tokens may be -1, which all stages with experts need
  };
  /// FlatRangeCallback of each chunk and microbatch. `is_last`: the gradients have been
  /// reported for all other microbatches.
  using ReadyCallback = std::function<void(int chunk, FlatRange range, bool is_last)>;
  /// Forward and backward passes of a step.
  void run(const Batch& batch, float scale, const ReadyCallback& ready);
  /// Only the forward passes.
  void run_forward(const Batch& batch);
  /// Loss of the last stage (Stage::take_loss); 0 on the other ranks.
  double take_loss();
  /// Bytes of this rank's activations. Grows in the first `run`.
  size_t activation_bytes() const;
  /// Copies an embedding that is tied across stages to the first one, after its weights changed.
  void share_embedding();

  struct Times {
    /// The waits are part of the passes. Zero on GPUs, where both are only enqueued.
    double passes_s = 0, waited_s = 0;
    uint64_t sent_bytes = 0;  ///< messages to other stages since the last `run`
  };
  /// Times of the last `run`.
  const Times& times() const { return times_; }

 private:
  struct Pass {
    enum class Kind : uint8_t { forward, backward, backward_input, backward_weight, embedding };
    Kind kind;
    int chunk, microbatch;
    bool is_final = false;  ///< gradients then have those of all microbatches
  };
  static Phase phase_of(Pass::Kind kind);
  static const char* name_of(Pass::Kind kind);
  std::vector<Pass> passes_of(int rank) const;
  template <typename IsSend, typename IsReceive, typename Before>
  int max_waiting(int source, const IsSend& is_send, int destination, const IsReceive& is_receive,
                  const Before& before) const;

  int stage(int chunk) const { return schedule::stage_of(shape_, rank_, chunk); }
  bool is_last(int stage) const { return stage + 1 == shape_.stages(); }
  int activations(int stage) const { return 2 * stage; }    // channel to the next stage
  int gradients(int stage) const { return 2 * stage + 1; }  // channel from it
  int lookups() const { return 2 * (shape_.stages() - 1); }
  void make_links(bool forward_runs, const Wire& wire);
  void mark_final(int chunk);
  int take_slot(const Pass& pass);
  int find_slot(const Pass& pass) const;
  void release(const Pass& pass);
  void forward(const Pass& pass, const Batch& batch);
  void backward(const Pass& pass, float scale, const FlatRangeCallback& ready);
  void backward_embedding(const Pass& pass, const FlatRangeCallback& ready);

  Communicator* pp_;
  schedule::PipelineShape shape_;
  int rank_;
  std::vector<std::unique_ptr<PipelineStage>> stages_;
  bool has_tied_ = false;
  std::vector<Pass> passes_;
  std::optional<StageLinks> links_;
  uint64_t sent_bytes_ = 0;                          // until the last run's end
  uint64_t forward_begin_ = 0, backward_begin_ = 0;  // numbers of the run's first messages
  struct Slot {
    int microbatch = -1;  ///< -1: free
    int uses = 0;         ///< passes that are still to read it
  };
  std::vector<std::vector<Slot>> slots_;  // by chunk
  Times times_;
};

}  // namespace tandem
