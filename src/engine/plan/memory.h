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
/// Bytes of a rank's gradients that have not left yet (ZeRO-2).
double gradient_window_bytes(const TrainConfig& config, bool on_gpus);
/// Bytes of a rank's messages to and from its replicas.
double message_bytes(const TrainConfig& config, bool on_gpus);
/// Bytes of a checkpoint, without its text files.
double checkpoint_bytes(const TrainConfig& config);
/// Bytes of the snapshots that periodic checkpoints are written from, of all ranks together; in
/// host memory.
double snapshot_bytes(const TrainConfig& config);
/// Bytes of GPU memory that a rank needs: state, messages and activations.
double gpu_bytes(const TrainConfig& config);
/// "expected memory: 12.0 bytes a parameter and rank (2 weights + 4 gradients + 6 optimizer), …"
std::string describe_memory(const TrainConfig& config, bool on_gpus);
/// Throws ConfigError if the ranks on this machine need more than its memory. `on_gpus`:
/// activations are in the GPUs' memory, which is not checked.
void check_memory(const TrainConfig& config, bool on_gpus = false);
/// Throws InvalidArgument if a model and its windows need more than this machine's memory.
void check_memory(const ModelConfig& model, const EvaluateOptions& options);

}  // namespace tandem
