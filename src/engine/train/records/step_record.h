// Record of a training step, and the interface of its receivers.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace tandem {

/// Mean of the ranks, by axis of parallelism.
struct AxisMeans {
  double tp = 0, ep = 0, dp = 0, pp = 0, cp = 0, sync = 0;
  AxisMeans operator+(const AxisMeans& o) const {
    return {tp + o.tp, ep + o.ep, dp + o.dp, pp + o.pp, cp + o.cp, sync + o.sync};
  }
  AxisMeans operator/(double ranks) const {
    return {tp / ranks, ep / ranks, dp / ranks, pp / ranks, cp / ranks, sync / ranks};
  }
};

struct StepRecord {
  int64_t step = 0;  ///< from 1
  double loss = 0;   ///< nats per token
  double lr = 0, grad_norm = 0;
  int64_t batch = 0;   ///< sequences of this step
  int64_t tokens = 0;  ///< predicted in this step
  double tokens_per_s = 0, step_ms = 0;
  // Times of the rank with the longest compute time.
  double compute_ms = 0;  ///< including GEMMs
  double gemm_ms = 0;
  double exposed_comm_ms = 0;
  AxisMeans exposed_ms;     ///< waits for ranks of the axis
  double recompute_ms = 0;  ///< parts of the three above in passes that ran again
  double data_wait_ms = 0;  ///< for text, of the rank that waited longest
  /// Share of the time of forward and backward passes in which ranks waited for other pipeline
  /// stages, or for the slowest rank's last pass; mean of the ranks.
  std::optional<double> bubble;  ///< not on GPUs
  int64_t memory_bytes = 0;      ///< in use on a rank (memory_in_use in core/exec.h), largest
  // Bytes sent between data-parallel ranks, summed over ranks, and those of gradients if
  // uncompressed.
  uint64_t gradient_bytes = 0, uncompressed_gradient_bytes = 0, weight_bytes = 0;
  /// Bytes that layers sent to tensor-parallel ranks, and to those with other experts, summed over
  /// ranks; not on GPUs.
  uint64_t tp_bytes = 0, expert_bytes = 0;
  /// Time for which a rank waited for a checkpoint between the step before and this one, longest;
  /// if checkpoints are periodic.
  std::optional<double> checkpoint_ms;
  std::optional<int64_t> saved_step;    ///< newest checkpoint of this run on disk, verified
  std::optional<uint64_t> stage_bytes;  ///< sent between pipeline stages, summed over ranks
  uint64_t cp_bytes = 0;                ///< sent between context-parallel ranks, likewise
  uint64_t sync_bytes = 0;              ///< sent between learners, summed over ranks
  /// Learners whose messages counted in the exchange that this step applied, of rank 0's shard;
  /// none without sync.quorum.
  std::vector<int> counted_learners;
  AxisMeans sent_bytes;            ///< the bytes above, in a step
  bool counts_layer_bytes = true;  ///< tp_bytes, expert_bytes, cp_bytes; false on GPUs
  /// Weights, gradients and optimizer state of a rank, over its parameters; largest.
  double state_bytes_per_parameter = 0;
  double mfu = 0;  ///< utilization (engine/plan/cost/utilization.h); 0: not known
  std::optional<double> validation_loss;  ///< nats per byte of held-out files, or per token
  bool validates_bytes = true;            ///< the unit of validation_loss
  // MoE models, over all tokens of the step.
  std::optional<double> aux_loss;  ///< load-balancing loss of all layers, as trained on
  /// Rows over the mean per MoE layer: of the fullest EP rank, and of the fullest expert.
  std::vector<double> imbalance, expert_imbalance;
  std::vector<std::vector<int64_t>> expert_rows;  ///< by layer and expert
};

/// Receives every finished step, on rank 0, in order.
class StepSink {
 public:
  virtual ~StepSink() = default;
  virtual void add(const StepRecord& step) = 0;
};

}  // namespace tandem
