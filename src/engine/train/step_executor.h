// Work of one training step on a rank: reading, forward and backward passes of its microbatches,
// gradient reduction, update.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "engine/data/config.h"
#include "engine/data/loader.h"
#include "engine/data/sampler.h"
#include "engine/parallel/config.h"
#include "engine/parallel/dims.h"
#include "engine/parallel/pipeline.h"
#include "engine/parallel/sharded/sharded_optimizer.h"
#include "engine/train/config.h"
#include "engine/train/model_ranks.h"
#include "engine/train/step_exchange.h"

namespace tandem {

/// Sampler options of a job.
SamplerOptions make_sampler_options(const DataConfig& data,
                                    std::function<int64_t(int64_t sample)> order = {});

class StepExecutor {
 public:
  /// All must outlive this object. Collective.
  StepExecutor(const RunConfig& train, const ParallelConfig& parallel, const ParallelGroups& groups,
               const TokenSource& source, const Sampler& sampler, ModelRanks& ranks);

  /// Sequences of the step whose first sample is `first`, over all ranks.
  int64_t batch(int64_t first) const { return train_.batch_at(first); }
  /// Number of target tokens in the step whose first sample is `first`, over all ranks.
  /// After a read error, as for `compute`, all of them.
  int64_t targets(int64_t first);

  struct Result {
    double loss = 0;  ///< this rank's share, in nats: TP rank 0 of a replica's last stage has the
                      ///< replica's, or the first one has all replicas' if ranks run several
    double squares = 0;  ///< of the gradients' shards on this rank and, for pipeline rank 0, of the
                         ///< other stages' shards; likewise
    TextRead text;
    int64_t targets = 0;  ///< of this rank's learner
  };
  /// Begins to read the text of the step whose first sample is `first` in the background. `compute`
  /// does so for the next step.
  void load(int64_t first);
  /// Runs forward and backward passes on this rank's samples, and reduces the gradients.
  /// `targets`: of the step. After a read error the step continues with ignored text, as other
  /// ranks wait for this one's contribution; it must then be dropped. Collective.
  Result compute(int64_t first, int64_t targets);
  /// Updates the weights with the gradients of `compute`; the next forward pass waits for them.
  void update(const AdamStep& step);
  /// After this rank's slices were changed other than by `update`, whose weights must have been
  /// awaited: the next forward pass waits for those of all owners.
  void gather_weights();
  /// Must be called after weights or optimizer state were written other than by `update`.
  /// Collective.
  void weights_changed();
  /// CPU ranks: as ShardedOptimizer::progress, for all chunks. After `update` it begins to send
  /// weights.
  void progress();
  /// Times of the last step's passes; nullopt without pipeline stages.
  std::optional<Pipeline::Times> times() const {
    return groups_.pp() ? std::optional(times_) : std::nullopt;
  }
  /// Bytes of this rank's activations. Grows in the first step.
  size_t activation_bytes() const { return pipeline_->activation_bytes(); }
  /// Blocks until all weights are updated. Called before they are read other than by a forward
  /// pass of training. Collective.
  void await_weights();
  /// ShardedOptimizer::await_slices of all chunks.
  void await_slices();

  /// Sampler::cursors of the last step, on a rank that reads its first sample.
  std::span<const StreamCursor> cursors() const {
    return text_.empty() ? std::span<const StreamCursor>() : text_[0]->cursors();
  }
  /// Message of a text that could not be read; empty if there is none.
  const std::string& read_error() const { return read_error_; }
  /// Called before each step. Verifies the text if an epoch ended since the last call: file times
  /// are not enough, as writes through a mapping show late. Collective.
  void verify_text(int64_t first);

 private:
  int64_t count_targets(int64_t first, int64_t samples);
  int64_t learner_targets(int64_t first, int64_t targets);
  void await_in_passes();
  void read_microbatch(int index);
  TextRead text_read() const;
  void ignore_text(const std::string& error);
  void make_pipeline(int microbatches);
  /// Microbatches of the logical replica of a round that the pipeline runs at once.
  struct Run {
    int round, first, count;
  };
  Pipeline::Batch batch_of(const Run& run);
  std::vector<Run> runs() const;
  bool has_replica(int round) const;
  void begin_step();
  void run_passes(float scale);
  void take_loss();
  double sum_losses();
  double sum_squares();
  std::vector<SquareTerm> square_terms();

  const RunConfig& train_;
  const ParallelConfig& parallel_;
  const ParallelGroups& groups_;
  const TokenSource& source_;
  const Sampler& sampler_;
  ModelRanks& ranks_;
  int64_t microbatch_;    // sequences
  bool has_padding_;      // experts must not get some rows of the text
  bool reads_text_;       // has the model's first or last stage, or one that needs documents or
                          // padding
  int microbatches_ = 0;  // of a logical replica
  std::optional<Pipeline> pipeline_;
  int pipeline_microbatches_ = 0;
  Pipeline::Times times_;       // of a step's passes
  std::vector<double> losses_;  // by round
  int untaken_round_ = -1;      // of passes whose loss was not taken yet
  int64_t verified_ = -1;       // sample of the last call of verify_text
  std::shared_ptr<Loader> loader_;
  int64_t loading_ = -1;  // first sample of the step that is read in advance
  // Text of a step, by microbatch of all rounds.
  std::vector<std::shared_ptr<const TextBlock>> text_, next_text_;
  std::vector<int32_t> tokens_, targets_, document_starts_;
  std::string read_error_;
};

}  // namespace tandem
