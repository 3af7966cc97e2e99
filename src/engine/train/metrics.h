// OUT/metrics.jsonl: one JSON object per step, in order, each step once, also across resumes.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "core/file_descriptor.h"
#include "engine/model/codec_policy.h"

namespace tandem {

struct StepMetrics {
  int64_t step = 0;  ///< from 1
  double loss = 0;   ///< nats per token
  double lr = 0, grad_norm = 0;
  int64_t tokens = 0;  ///< predicted in this step
  double tokens_per_s = 0, step_ms = 0;
  // Of the rank that computed longest.
  double compute_ms = 0;  ///< matrix products included
  double gemm_ms = 0;
  double exposed_comm_ms = 0;
  // Sent between data-parallel ranks, by all ranks; plain: what gradients are without a codec.
  uint64_t gradient_bytes = 0, plain_gradient_bytes = 0, weight_bytes = 0;
  double mfu = 0;                         ///< of this step (engine/plan/utilization.h)
  std::optional<double> validation_loss;  ///< nats per byte of the held-out files after this step
  // With experts, of all tokens of the step.
  std::optional<double> aux_loss;  ///< load-balancing loss of all layers, as it is trained on
  /// By layer with experts, rows over the mean: of the fullest EP rank, and of the fullest expert.
  std::vector<double> imbalance, expert_imbalance;
  std::vector<std::vector<int64_t>> expert_rows;  ///< by layer and expert
};
std::string to_json_line(const StepMetrics& metrics);
/// A line for each of gradients and weights that travel over a wire format: bytes of a step, beside
/// those without.
std::vector<std::string> describe_sent(const CodecPolicy& policy, bool error_feedback,
                                       const StepMetrics& metrics);

class MetricsLog {
 public:
  /// Keeps the lines of steps up to `last_step` and drops later ones, as well as a last one that
  /// was cut. Damaged lines are moved to PATH.damaged, and the log says so.
  MetricsLog(const std::string& path, int64_t last_step);
  void append(const StepMetrics& metrics);
  void sync();

 private:
  std::string path_;
  FileDescriptor file_;
};

}  // namespace tandem
