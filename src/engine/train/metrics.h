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
  // Times of the rank with the longest compute time.
  double compute_ms = 0;  ///< including GEMMs
  double gemm_ms = 0;
  double exposed_comm_ms = 0;
  // Bytes sent between data-parallel ranks, summed over ranks; plain: uncompressed gradients.
  uint64_t gradient_bytes = 0, plain_gradient_bytes = 0, weight_bytes = 0;
  double mfu = 0;                         ///< this step's utilization (engine/plan/utilization.h)
  std::optional<double> validation_loss;  ///< nats per byte of the held-out files after this step
  // MoE models, over all tokens of the step.
  std::optional<double> aux_loss;  ///< load-balancing loss of all layers, as trained on
  /// Rows over the mean per MoE layer: of the fullest EP rank, and of the fullest expert.
  std::vector<double> imbalance, expert_imbalance;
  std::vector<std::vector<int64_t>> expert_rows;  ///< by layer and expert
};
std::string to_json_line(const StepMetrics& metrics);
/// One line for each of gradients and weights sent in a wire format: bytes per step, and as a share
/// of the uncompressed ones.
std::vector<std::string> describe_sent(const CodecPolicy& policy, bool error_feedback,
                                       const StepMetrics& metrics);

class MetricsLog {
 public:
  /// Keeps the lines of steps up to `last_step` and drops later ones and a truncated last line.
  /// Damaged lines are moved to PATH.damaged, with a log message.
  MetricsLog(const std::string& path, int64_t last_step);
  /// After an IoError the line is kept: the next call writes it first.
  void append(const StepMetrics& metrics);
  /// Tries lines that append() could not write again.
  void sync();

 private:
  void write_rest();

  std::string path_;
  FileDescriptor file_;
  std::string unwritten_;
};

}  // namespace tandem
