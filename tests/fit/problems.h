// Generated problems, and runs of the methods on them.
#pragma once

#include <string>

#include "fit/fit.h"

namespace tandem::fit::test {

struct Shape {
  int64_t rows = 96, features = 12;
  int64_t entries = 6;      ///< of a row
  double difference = 0.6;  ///< between rows at the begin and at the end, so that clients differ
  uint64_t seed = 1;
};

/// Rows whose labels follow a hidden vector that drifts along the rows. Logistic: sorted by label,
/// so that the first clients have one class and the last ones the other.
Dataset make_data(const Shape& shape, Loss loss);

/// Rows whose features sum to 0, so that a vector of equal values is no part of the data: v and -v,
/// normal, in columns 2k and 2k + 1, k = row % pairs. Labels as those of make_data.
Dataset make_contrasts(int64_t rows, int64_t pairs, Loss loss);

/// check_options of `method`.
void check(const std::string& method, const FitOptions& options);

/// `method` on `problem`, with `ranks` threads.
FitRun run(const std::string& method, const Problem& problem, const FitOptions& options,
           int ranks = 1);

}  // namespace tandem::fit::test
