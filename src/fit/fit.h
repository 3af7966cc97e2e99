// Runs of the methods of `tandem fit`, with their distance to the exact answer.
#pragma once

#include <functional>
#include <vector>

#include "fit/methods/method.h"
#include "tandem/communicator.h"

namespace tandem::fit {

/// Distance from which on a run has diverged.
constexpr double kDiverged = 1e6;

/// State of a run after a round.
struct FitPoint {
  int64_t rounds = 0;
  FloatCount floats;       ///< of the busiest client, so far
  int64_t bytes_sent = 0;  ///< by all clients and the server, so far
  double distance = 0;     ///< |x - target| / |target|, max over the method's answers
  double objective = 0;    ///< max over the method's answers
  double seconds = 0;      ///< of the rounds, without the measurement of distances
};

struct FitRun {
  FitPoint last;
  /// Round 0, the first hundred rounds, and then one in a hundred rounds so far.
  std::vector<FitPoint> history;
  std::vector<Setting> settings;
  bool reached_tol = false;
  Vector answer;    ///< on rank 0: the server's or client 0's; empty if answers travel
  double bias = 0;  ///< |target - optimum| / |optimum| of a method whose target is another point
};

/// Collective. Runs `method` from zero until the distance is at most options.tol, for at most
/// options.max_rounds, or until it diverges. `report` is called on rank 0 after each round.
///
/// Distances and objectives are exchanged outside the counted messages. All results but `seconds`
/// have the same bits for any number of ranks.
FitRun run_method(Communicator& comm, const Problem& problem, const MethodRow& method,
                  const FitOptions& options,
                  const std::function<void(const FitPoint&)>& report = {});

}  // namespace tandem::fit
