// Error of predictions for software whose runs no fit has seen, as that of the engine.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <vector>

#include "engine/plan/fit/run_rows.h"

namespace tandem::plan {

/// Errors of the runs that are most alike, each predicted from all other groups' runs, without its
/// own group's and software's deviations.
struct ErrorBar {
  double share = 0;     ///< of the predicted step that four of five runs are within
  size_t runs = 0;      ///< that it was found on
  size_t groups = 0;    ///< of these runs
  std::string of = {};  ///< "H100 bf16"
};

/// For a run as `row`, whose group and software are not among `runs`: from runs of its GPU's family
/// and precision, dense or MoE as it is, of at least two groups; if there are none, of its family,
/// of its precision on all GPUs, or all runs. Nothing if `runs` has fewer than two groups.
std::optional<ErrorBar> error_bar(std::span<const RunRow> runs, const RunRow& row);

/// Lowest of `errors`, of which there is one, that at least four of five are not above.
double share_within(std::vector<double> errors);

}  // namespace tandem::plan
