// API-BCD without rounds: each rank solves whichever token has come, the one of the lowest round
// first, and no token waits for another. The point that the walk converges to is that of
// synchronous rounds; with several tokens and ranks its path depends on timing.
#pragma once

#include "fit/fit.h"
#include "fit/methods/token_clients.h"

namespace tandem::fit {

/// Throws InvalidArgument if the messages of so many tokens take too much memory.
void check_async_walk(const Setup& setup, const ApiBcdParams& params);

/// Collective. As run_method. A FitPoint is after a visit: `rounds` is the number of visits of the
/// token that has made most, `floats` those of as many synchronous rounds with the visits of the
/// whole run, `distance` the max over the tokens after their last visits, `objective` NaN but in
/// the last point. On one rank these have the bits of synchronous rounds at the end. The history
/// has the first 128 rounds of each token, and then at least 128 of each doubling.
FitRun run_async_walk(const Setup& setup, const ApiBcdParams& params, const Vector& target,
                      const std::function<void(const FitPoint&)>& report);

}  // namespace tandem::fit
