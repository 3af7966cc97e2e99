#include "engine/plan/fit/prediction.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <map>

#include "core/system/printable.h"
#include "engine/plan/cost/rank_state.h"
#include "tandem/error.h"

namespace tandem::plan {
namespace {

/// Least-squares line through (microbatches, step).
struct Line {
  double n = 0, m = 0, t = 0, mm = 0, mt = 0;

  void add(const RunRow& row) {
    const double x = row.microbatches(), y = *row.step_s;
    n += 1, m += x, t += y, mm += x * x, mt += x * y;
  }
  std::optional<double> at(double x) const {
    const double spread = n * mm - m * m;
    if (n < 2 || spread <= 1e-9 * n * mm) return std::nullopt;
    const double slope = (n * mt - m * t) / spread;
    return slope * x + (t - slope * m) / n;
  }
};

/// Rows of one line differ in nothing but their number of replicas and microbatches.
std::string line_key(const RunRow& row) {
  return fmt::format("{}\n{}\n{}\n{}\n{}\n{:g} {:g} {:g} {:g} {:g} {:g} {:g}", row.group, row.model,
                     row.software, row.gpu, row.precision, row.layers, row.seq, row.mbs, row.tp,
                     row.pp, row.cp, row.vpp);
}

bool usable(const RunRow& row) {
  return row.skipped.empty() && row.step_s;
}

void predict_into(std::span<const RunRow> fitted, std::span<const RunRow* const> rows,
                  Predictions& result) {
  const Calibration calibration(fitted, rows);
  std::map<std::string, Line> lines;
  for (const RunRow& row : fitted) {
    if (usable(row)) lines[line_key(row)].add(row);
  }
  for (const RunRow* row : rows) {
    if (!row->skipped.empty()) {
      result.skipped.push_back(row);
      continue;
    }
    const auto line = lines.find(line_key(*row));
    result.rows.push_back(
        {row, calibration.predict(*row), calibration.constant_flops_step(*row),
         line == lines.end() ? std::nullopt : line->second.at(row->microbatches()),
         peak_memory_gib(*row)});
  }
}

/// `predicted` and `measured` of a row; rows without one of them do not count.
template <class Predicted, class Measured>
Errors errors_of(const std::vector<Prediction>& rows, Predicted&& predicted, Measured&& measured) {
  Errors errors;
  for (const Prediction& row : rows) {
    const std::optional<double> value = predicted(row), truth = measured(*row.row);
    if (!truth || !value) continue;
    const double error = 100 * std::abs(*value / *truth - 1);
    errors.rows += 1;
    errors.mape += error;
    errors.worst = std::max(errors.worst, error);
  }
  if (errors.rows > 0) errors.mape /= double(errors.rows);
  return errors;
}

std::optional<double> step_of(const RunRow& row) {
  return row.step_s;
}

std::optional<double> memory_of(const RunRow& row) {
  return row.memory_gib > 0 ? std::optional(row.memory_gib) : std::nullopt;
}

}  // namespace

Errors Predictions::model_errors() const {
  return errors_of(
      rows, [](const Prediction& row) { return std::optional(row.time.total); }, step_of);
}

Errors Predictions::constant_flops_errors() const {
  return errors_of(
      rows, [](const Prediction& row) { return std::optional(row.constant_flops_s); }, step_of);
}

Errors Predictions::line_errors() const {
  return errors_of(
      rows, [](const Prediction& row) { return row.line_s; }, step_of);
}

Errors Predictions::memory_errors() const {
  return errors_of(
      rows, [](const Prediction& row) { return std::optional(row.memory_gib); }, memory_of);
}

Predictions predict_rows(std::span<const RunRow> fitted, std::span<const RunRow> rows) {
  Predictions result;
  std::vector<const RunRow*> all;
  for (const RunRow& row : rows) all.push_back(&row);
  predict_into(fitted, all, result);
  return result;
}

Predictions leave_out(std::span<const RunRow> rows, std::string_view column,
                      const RowFilter& filter) {
  std::map<std::string, std::vector<const RunRow*>> left_out;
  for (const RunRow& row : rows) {
    if (filter.matches(row)) left_out[column_text(row, column)].push_back(&row);
  }
  Predictions result;
  for (const auto& [value, members] : left_out) {
    std::vector<RunRow> others;
    for (const RunRow& row : rows) {
      if (column_text(row, column) != value) others.push_back(row);
    }
    if (std::ranges::none_of(others, usable)) {
      throw InvalidArgument(fmt::format("--leave-out {}: every row has {}: expected rows to fit",
                                        printable(column), printable(value)));
    }
    predict_into(others, members, result);
  }
  const auto position = [&](const RunRow* row) { return row - rows.data(); };
  std::ranges::sort(result.rows, {}, [&](const Prediction& p) { return position(p.row); });
  std::ranges::sort(result.skipped, {}, position);
  return result;
}

}  // namespace tandem::plan
