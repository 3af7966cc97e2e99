// Receipts of measurements: what operators that choose among the measured candidates run.
#pragma once

#include <string>
#include <vector>

#include "bench/bench.h"

namespace tandem {

/// Receipt of an operator of `ranks` ranks that was asked for `automatic` and chooses among the
/// candidates of `result` by the tuner's rule. The unfused reference is none of them.
Receipt choose_receipt(const BenchRequest& request, const BenchResult& result, int ranks);

/// Lines, of at most `columns`, for the receipts of several ranks that are not as asked.
std::string receipt_lines(const std::vector<Receipt>& receipts, size_t columns);

}  // namespace tandem
