// Memory of a training run, computed before allocation.
#pragma once

#include <string>

#include "engine/config/config.h"
#include "engine/eval/evaluate.h"

namespace tandem {

/// Bytes a parameter and rank; train.dtype "auto" as f32.
struct StateBytes {
  double weights = 0, gradients = 0;
  double optimizer = 0;  ///< moments and masters, divided among the ranks
  double residuals = 0;  ///< error feedback
  double total() const { return weights + gradients + optimizer + residuals; }
};
/// State of parameters that `replicas` ranks have a copy of, of the rank with the largest share.
StateBytes state_bytes(const TrainConfig& config, int64_t replicas);
/// Bytes of weights, gradients and optimizer state of all ranks together, without a window. In
/// floating point, which does not overflow.
double training_bytes(const TrainConfig& config);
/// Bytes of gradients that have not left yet (ZeRO-2), of a rank of a pipeline stage.
double gradient_window_bytes(const TrainConfig& config, bool on_gpus, int pp_rank = 0);
/// Bytes of a rank's memory, by what it is for.
struct RankMemory {
  double state = 0;        ///< weights, gradients and optimizer
  double messages = 0;     ///< to and from its replicas
  double activations = 0;  ///< saved and shared (engine/plan/cost/activations.h)
  double packing = 0;      ///< operands of products on CPUs with AMX
  double total() const { return state + messages + activations + packing; }
};
/// Memory of the rank that needs most. `with_packing`: CPU products pack operands.
RankMemory largest_rank_memory(const TrainConfig& config, bool on_gpus, bool with_packing);
/// Bytes of a checkpoint, without its text files.
double checkpoint_bytes(const TrainConfig& config);
/// Bytes of the snapshots that periodic checkpoints are written from, of all ranks together; in
/// host memory.
double snapshot_bytes(const TrainConfig& config);
/// "expected memory: 12.0 bytes a parameter and rank (2 weights + 4 gradients + 6 optimizer), …"
std::string describe_memory(const TrainConfig& config, bool on_gpus);
/// Throws ConfigError if the ranks on this machine need more than its memory. `on_gpus`:
/// activations are in the GPUs' memory, which is not checked.
void check_memory(const TrainConfig& config, bool on_gpus = false);
/// Throws InvalidArgument if a model and its windows need more than this machine's memory.
void check_memory(const ModelConfig& model, const EvaluateOptions& options);

}  // namespace tandem
