// Results of `tandem fit`: JSON and a table.
#pragma once

#include <string>
#include <vector>

#include "fit/fit.h"

namespace tandem::cli {

struct FinishedFit {
  const fit::MethodRow* method;
  bool is_control;
  fit::FitRun run;
};

/// Problem and options that all methods of a command have in common.
struct FitHeader {
  const fit::Problem& problem;
  const fit::FitOptions& options;
  int ranks = 1;
  std::string link = {};               ///< emulated, or empty
  const fit::Dataset* test = nullptr;  ///< held-out rows, or nullptr
};

/// An object for one method, else an array: {"method", "rounds", "floats_up", "floats_down",
/// "bytes_sent", "distance", "objective", "optimum", "seconds", "nonzeros", "optimal_nonzeros",
/// "accuracy", "optimal_accuracy", "reached_tol", "config": {...}, "history": [{"rounds", ...,
/// "seconds"}]}.
std::string fit_json(const FitHeader& header, const std::vector<FinishedFit>& finished);

/// Page with these numbers and their curves, which opens offline.
std::string fit_page(const FitHeader& header, const std::vector<FinishedFit>& finished);

/// Table of these numbers, without the history.
std::string fit_table(const FitHeader& header, const std::vector<FinishedFit>& finished);

}  // namespace tandem::cli
