// Fair timing of collective calls: ranks start together, variants run interleaved in random order,
// and the slowest rank's time counts.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "tandem/communicator.h"

namespace tandem {

struct MeasureOptions {
  uint64_t seed = 1;
  int min_rounds = 3, max_rounds = 9;
  double seconds = 1;  ///< rounds stop after about this long (never before min_rounds)
};

/// Variant that returns the seconds it took on this rank.
using TimedRun = std::function<double()>;

/// Collective. Runs every variant once untimed, then in rounds. Returns seconds [variant][round],
/// equal on every rank.
std::vector<std::vector<double>> measure(Communicator& comm,
                                         std::span<const std::function<void()>> variants,
                                         const MeasureOptions& options);
std::vector<std::vector<double>> measure(Communicator& comm, std::span<const TimedRun> variants,
                                         const MeasureOptions& options);
/// Times `call` from the moment all ranks have arrived. Collective.
TimedRun timed(Communicator& comm, std::function<void()> call);

/// Replaces each value by its maximum over ranks. Collective.
void max_over_ranks(Communicator& comm, std::span<double> values);
double max_over_ranks(Communicator& comm, double value);

/// Median of the values; 0 for none.
double median(std::vector<double> values);
/// Interquartile range divided by the median; 0 for fewer than two values.
double relative_spread(std::vector<double> values);

}  // namespace tandem
