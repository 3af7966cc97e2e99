// Pipeline parallelism: runs the passes of a schedule (schedule/pipeline.h) on the stages of a rank
// and transfers activations and gradients between them.
//
// A stage puts its output into a slot of the next stage's rank, and its input's gradient into one
// of the rank before; receiving thus never blocks the sender. There are as many slots as messages
// can wait by the schedule, so a sender finds the slot's last message acknowledged.
//
// A tied embedding with its ends in two stages belongs to the last one (engine/model/stage.h). The
// first stage sends it the gradients of its lookups, which are added in the order of the whole
// model's backward passes, and receives the updated weights.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "engine/config/config.h"
#include "engine/model/stage.h"
#include "engine/parallel/pipeline_stage.h"
#include "schedule/pipeline.h"
#include "tandem/communicator.h"

namespace tandem {

/// Schedule of a step; without pipeline parallelism each microbatch's passes in turn.
schedule::PipelineShape pipeline_shape(const TrainConfig& config);
/// Layers of every stage, in the order of the model.
std::vector<StageLayers> pipeline_layers(const TrainConfig& config);

/// Messages of one size between pipeline ranks, through slots of a symmetric buffer.
class StageLinks {
 public:
  /// From one stage to another. Messages are numbered consecutively from 0.
  struct Channel {
    int source = 0, destination = 0;  ///< ranks
    int slots = 1;
    const char* op = "";  ///< name in errors and spans
  };

  /// The channels are the same on all ranks. Collective over `pp`.
  StageLinks(Communicator& pp, std::vector<Channel> channels, size_t message_bytes);
  /// Waits until the messages sent have been copied, which needs no answer of the others.
  ~StageLinks();
  StageLinks(const StageLinks&) = delete;
  StageLinks& operator=(const StageLinks&) = delete;

  /// Sends a copy of the message.
  void send(int channel, uint64_t number, const void* message);
  /// Waits for a message, which stays valid until it is acknowledged.
  const std::byte* receive(int channel, uint64_t number);
  void acknowledge(int channel, uint64_t number);
  /// Seconds of this rank's waits.
  double waited_s() const { return waited_s_; }

 private:
  struct Slots {
    size_t offset = 0;                ///< of the first slot, on the destination
    int arrival = 0;                  ///< signal of the first slot, on the destination
    int acknowledgement = 0;          ///< likewise, on the source
    std::vector<std::byte> messages;  ///< sent, on the source
  };
  void wait(int signal, uint64_t epoch, const Channel& channel, int peer, uint64_t number);

  Communicator& pp_;
  std::vector<Channel> channels_;
  size_t message_bytes_;
  std::vector<Slots> slots_;  // by channel
  std::shared_ptr<SymmetricBuffer> buffer_;
  double waited_s_ = 0;
};

class Pipeline {
 public:
  /// `pp`: the ranks of the shape; nullptr if it is one. It must outlive this object. `stages`:
  /// this rank's chunks. `forward_runs`: whether `run_forward` is called. Collective.
  Pipeline(Communicator* pp, const schedule::PipelineShape& shape,
           std::vector<std::unique_ptr<PipelineStage>> stages, bool forward_runs);

  /// Text of a step's microbatches.
  struct Batch {
    /// Called before the passes of a microbatch that need it; writes to the spans.
    std::function<void(int microbatch)> read;
    std::span<const int32_t> tokens, targets;
  };
  /// Forward and backward passes of a step. `ready`: as Stage::backward's, of each chunk, once its
  /// gradients have those of all microbatches.
  void run(const Batch& batch, float scale,
           const std::function<void(int chunk, FlatRange range)>& ready);
  /// Only the forward passes.
  void run_forward(const Batch& batch);
  /// As Stage's, of the last stage; 0 on the other ranks.
  double take_loss();
  /// Copies an embedding that is tied across stages to the first one, after its weights changed.
  void share_embedding();

  struct Times {
    double passes_s = 0, waited_s = 0;  ///< the waits are part of the passes
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
  std::vector<Pass> passes_of(int rank) const;
  template <typename IsSend, typename IsReceive, typename Before>
  int max_waiting(int source, const IsSend& is_send, int destination, const IsReceive& is_receive,
                  const Before& before) const;

  int stage(int chunk) const { return schedule::stage_of(shape_, rank_, chunk); }
  bool is_last(int stage) const { return stage + 1 == shape_.stages(); }
  int activations(int stage) const { return 2 * stage; }    // channel to the next stage
  int gradients(int stage) const { return 2 * stage + 1; }  // channel from it
  int lookups() const { return 2 * (shape_.stages() - 1); }
  void make_links(bool forward_runs);
  void mark_final(int chunk);
  int take_slot(const Pass& pass);
  int find_slot(const Pass& pass) const;
  void release(const Pass& pass);
  void forward(const Pass& pass, const Batch& batch);
  void backward(const Pass& pass, float scale, const FlatRangeCallback& ready);
  void backward_embedding(const Pass& pass, const FlatRangeCallback& ready);
  void receive(int channel, uint64_t number, const Tensor& to);

  Communicator* pp_;
  schedule::PipelineShape shape_;
  int rank_;
  std::vector<std::unique_ptr<PipelineStage>> stages_;
  bool has_tied_ = false;
  std::vector<Pass> passes_;
  std::optional<StageLinks> links_;
  uint64_t forward_begin_ = 0, backward_begin_ = 0;  // numbers of the run's first messages
  struct Slot {
    int microbatch = -1;  ///< -1: free
    int uses = 0;         ///< passes that are still to read it
  };
  std::vector<std::vector<Slot>> slots_;  // by chunk
  Times times_;
};

}  // namespace tandem
