// Predicted step times of rows, their errors, and the simple baselines next to them.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "engine/plan/fit/calibration.h"

namespace tandem::plan {

struct Prediction {
  const RunRow* row = nullptr;
  StepTime time;
  double constant_flops_s = 0;   ///< every GPU at the median FLOP/s of its class
  std::optional<double> line_s;  ///< a · microbatches + b through rows of its model and layout
  double memory_gib = 0;         ///< peak of a rank
};

/// Errors in percent of the measured step: mean and worst of the absolute values.
struct Errors {
  size_t rows = 0;
  double mape = 0, worst = 0;
};

/// Results of one or several fits, in the order of the rows.
struct Predictions {
  std::vector<Prediction> rows;
  std::vector<const RunRow*> skipped;

  Errors model_errors() const;
  Errors constant_flops_errors() const;
  /// Errors of the rows that have a line.
  Errors line_errors() const;
  /// Errors of peak memory, of the rows that state it.
  Errors memory_errors() const;
};

/// Predicts `rows` from a calibration on `fitted`. Rows must outlive the result.
Predictions predict_rows(std::span<const RunRow> fitted, std::span<const RunRow> rows);

/// Predicts each of `rows` that `filter` accepts from a calibration on those of `rows` that differ
/// from it in `column` ("model": every model is predicted from the others).
Predictions leave_out(std::span<const RunRow> rows, std::string_view column,
                      const RowFilter& filter);

}  // namespace tandem::plan
