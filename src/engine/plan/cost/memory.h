// Memory of a training run, computed before allocation.
#pragma once

#include <algorithm>
#include <string>
#include <vector>

#include "engine/config/config.h"
#include "engine/eval/evaluate.h"
#include "engine/model/codec_policy.h"
#include "engine/model/layout.h"
#include "engine/model/stage.h"
#include "engine/parallel/dims.h"
#include "gemm/packed_bytes.h"
#include "schedule/pipeline.h"

namespace tandem {

/// Bytes a parameter and rank; train.dtype "auto" as f32.
struct StateBytes {
  double weights = 0, gradients = 0;
  double optimizer = 0;  ///< moments and masters, divided among the ranks
  double residuals = 0;  ///< error feedback
  double outer = 0;      ///< of learners' exchanges, divided as the optimizer's
  double total() const { return weights + gradients + optimizer + residuals + outer; }
};
/// Bytes of a rank's memory, by what it is for.
struct RankMemory {
  double state = 0;        ///< weights, their e4m3 copies, gradients and optimizer
  double messages = 0;     ///< to and from its replicas
  double exchanges = 0;    ///< changes and messages of learners, without the moments
  double activations = 0;  ///< saved and shared (engine/plan/cost/activations.h)
  double scratch = 0;      ///< of passes (engine/plan/cost/activations.h)
  double packing = 0;      ///< operands of products on CPUs with AMX
  double staging = 0;      ///< new weights in f32, before the first step (Stage::end_staging)
  double total() const {
    return state + messages + exchanges + std::max(activations + scratch + packing, staging);
  }
};

/// Memory of a job's ranks. Bytes are in floating point, which does not overflow.
class MemoryEstimate {
 public:
  /// `config` must outlive this object.
  explicit MemoryEstimate(const TrainConfig& config, bool on_gpus = false);

  /// State of parameters that `replicas` ranks have a copy of, of the rank with the largest share.
  StateBytes state(int64_t replicas) const;
  /// Bytes of weights, gradients and optimizer state of all ranks together, without a window.
  double training_bytes() const;
  /// Bytes of gradients that have not left yet (ZeRO-2), of a rank of a pipeline stage.
  double gradient_window_bytes(int pp_rank = 0) const;
  /// Bytes of all ranks' activations together.
  double activation_bytes() const;
  /// Memory of the rank that needs most. `with_packing`: CPU products pack operands.
  RankMemory largest_rank(bool with_packing) const;
  /// Bytes of a checkpoint, without its text files; of several learners at most.
  double checkpoint_bytes() const;
  /// Bytes of the snapshots that periodic checkpoints are written from, of all ranks together; in
  /// host memory.
  double snapshot_bytes() const { return num_snapshots_ * checkpoint_bytes(); }
  /// "expected memory: 12.0 bytes a parameter and rank (2 weights + 4 gradients + 6 optimizer), …"
  std::string describe() const;
  /// Throws ConfigError if the ranks on this machine need more than its memory; on GPUs only
  /// snapshots are there.
  void check() const;
  /// Throws ConfigError with the numbers if the rank that needs most needs more than `gpu_bytes`.
  /// A model with experts may have fewer rows than the estimate: its activations are not counted.
  void check_gpu(double gpu_bytes, const std::string& gpu) const;

 private:
  double owned_share(int64_t ranks) const;
  double gradient_element() const;
  double message_bytes(double parameters) const;
  double exchange_bytes(int pp_rank) const;
  PackedBytes packing(const ModelLayout& layout) const;
  ModelLayout layout(int stage) const;
  RankMemory rank(int pp_rank, bool with_packing) const;
  std::string describe_recompute() const;
  std::string describe(const RankMemory& memory) const;

  const ModelConfig& model_;
  const RunConfig& train_;
  const ParallelConfig& parallel_;
  const bool on_gpus_;
  const ParallelDims dims_;
  const CodecPolicy codec_;
  const int64_t microbatch_, bucket_;
  const GradientWindow window_;
  const schedule::PipelineShape shape_;
  const std::vector<StageLayers> layers_;  ///< by stage
  const bool replicates_state_;
  const int num_snapshots_;
  std::vector<double> activations_, scratch_;  ///< bytes, by pipeline rank
};

/// Throws InvalidArgument if a model and its windows need more than this machine's memory.
void check_memory(const ModelConfig& model, const EvaluateOptions& options);

}  // namespace tandem
