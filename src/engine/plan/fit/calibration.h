// Factors of the step cost, fitted to measured rows.
//
// The logarithm of a factor is a sum of normal deviations from its prior: one of all rows of a fit,
// and one for each GPU, GPU and precision, group and software version that the term distinguishes.
// The fit is the most probable sum (Levenberg-Marquardt on log step times, deterministic), so a
// term that the rows say nothing about stays physical.
#pragma once

#include <map>
#include <span>
#include <string>
#include <vector>

#include "engine/plan/cost/step_cost.h"

namespace tandem::plan {

/// One fit: of the rows of a class, or of several classes together.
struct Fit {
  size_t rows = 0, models = 0;
  double parameters = 0;  ///< effective: the trace of the fit's hat matrix
  double flops_rate = 0;  ///< median FLOP/s of a GPU over the rows, of `flops_per_token`
  std::map<std::string, double> deviations;  ///< by term and level, "gemm", "tp@software:…"

  Factors factors(const RunRow& row, const GpuSpec& gpu) const;
};

/// Fits of all classes of some rows. A class is a group, a GPU family, a precision, and dense or
/// MoE. Rows of a class without rows take the fit of a wider one: both precisions of the group, all
/// groups, then all rows. So do rows of a class with fewer than 20, but of both precisions of the
/// group, or for MoE of all groups, at most.
class Calibration {
 public:
  /// Fits what predictions of `predicted` need to the `rows` that have a step time and are not
  /// skipped. Throws InvalidArgument if there is none.
  Calibration(std::span<const RunRow> rows, std::span<const RunRow* const> predicted);

  /// Fit of the class of a row among `predicted`.
  const Fit& fit_of(const RunRow& row) const;
  /// Throws InvalidArgument for a GPU that is not known.
  StepTime predict(const RunRow& row) const;
  /// Step time if every GPU computed at the median FLOP/s of the narrowest class that has rows.
  double constant_flops_step(const RunRow& row) const;
  /// Fits by class, for reports.
  const std::map<std::string, Fit>& fits() const { return fits_; }

 private:
  struct RowClass {
    std::string fitted;     ///< of `fits_`
    double flops_rate = 0;  ///< median FLOP/s of a GPU, of `flops_per_token`
  };
  const RowClass& class_of(const RunRow& row) const;

  std::map<std::string, RowClass> classes_;  // by the narrowest class
  std::map<std::string, Fit> fits_;
};

/// Spec of a row's GPU. Throws InvalidArgument if it is not known.
GpuSpec gpu_of(const RunRow& row);

}  // namespace tandem::plan
