// Rows of training runs from a CSV file: model, layout, hardware and measured step time.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "schedule/pipeline.h"

namespace tandem::plan {

/// One training run. Numbers that the file leaves empty are 0, except where noted; `read_rows`
/// completes models by their names (see known_models.h).
struct RunRow {
  std::string id, group, model, gpu, precision, sharding, recompute, basis, software, notes;
  double layers = 0, hidden = 0, heads = 0, kv_heads = 0, head_dim = 0, ffn = 0, vocab = 0;
  double experts = 0, top_k = 0, shared_experts = 0;  ///< 0 experts: dense
  double moe_layer_share = 1;                         ///< of layers that have experts
  /// 1F1B with several stages per rank (vpp) is interleaved.
  schedule::PipelineKind schedule = schedule::PipelineKind::one_f_one_b;
  /// A layout of this engine: TP divides an expert's matrices, instead of the experts' tokens, and
  /// each stage of a rank has memory for its highest number of microbatches in flight.
  bool of_engine = false;
  bool tied_embeddings = false;            ///< of this engine's layouts: one table for both ends
  double dense_layers = 0, dense_ffn = 0;  ///< first layers without experts
  double expert_hosts = 0;                 ///< most hosts of a token's experts; 0: any
  double attention_weights = 0;            ///< a layer's, if not those of heads x head_dim
  bool gated = false;                      ///< three FFN matrices instead of two
  double seq = 0, gpus = 0;
  double tp = 1, pp = 1, cp = 1, ep = 1, dp = 0, vpp = 0;
  double mbs = 1, gbs = 0, grad_accum = 0;
  /// Predicted without its group's and software's deviations, as if no other run had them.
  bool is_of_new_software = false;
  std::optional<double> step_s;  ///< measured, or derived from a measured rate
  bool step_derived = false;
  double memory_gib = 0;  ///< peak of a rank ("allocated … GiB" in the notes)
  /// Reason why this row cannot be modelled; empty if it can.
  std::string skipped;

  double tokens() const { return gbs * seq; }  ///< a step
  double microbatches() const { return grad_accum; }
};

/// Reads rows with the columns of bench/published/runs.csv; order is free, unknown columns are
/// ignored. Throws IoError, or InvalidArgument that names the file, line, row and column.
std::vector<RunRow> read_rows(const std::string& path);
/// Same for text already read; `path` for messages.
std::vector<RunRow> parse_rows(std::string_view text, const std::string& path);

/// Matmul FLOPs of a token, forward and backward, attention counted causally:
/// 6 x weights of matrices used by a token + 6 x layers x attention width x sequence.
double flops_per_token(const RunRow& row);

/// Conditions on columns, "group=mosaic-mpt,gpu=H100,gpus<=1024": all must hold. `=` and `!=`
/// compare the beginning of a text or a number, `<=`, `>=`, `<`, `>` numbers.
class RowFilter {
 public:
  /// Throws InvalidArgument for an unknown column or operator.
  explicit RowFilter(std::string_view conditions);
  bool matches(const RunRow& row) const;

 private:
  struct Condition {
    std::string column, comparison, value;
  };
  std::vector<Condition> conditions_;
};

/// Text of a column that rows can be grouped by (model, group, gpu, precision, software, gpus …).
/// Throws InvalidArgument for an unknown column.
std::string column_text(const RunRow& row, std::string_view column);

}  // namespace tandem::plan
