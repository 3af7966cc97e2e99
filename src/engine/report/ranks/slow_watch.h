// Ranks that are slow for a while, found in the records of a run while it trains.
#pragma once

#include <map>
#include <string>
#include <utility>
#include <vector>

#include "engine/report/ranks/live_ranks.h"
#include "engine/report/ranks/stragglers.h"

namespace tandem::report {

struct SlowRank {
  Straggler straggler;
  RankPosition position;
};

class SlowWatch {
 public:
  /// Checks in a row, each with further steps, in which a rank must be slow.
  static constexpr int kChecks = 3;

  /// `folder`: OUT/ranks, which need not exist yet.
  explicit SlowWatch(std::string folder);

  /// Reads what was written since the last call, and returns the ranks that were slow in the newest
  /// 50 frames of this call and of the kChecks - 1 before: by 5 % in a phase of work, worth 2 % of
  /// the step. Each is returned once until it is no longer slow.
  std::vector<SlowRank> check();

 private:
  LiveRanks ranks_;
  std::map<std::pair<int, Phase>, int> slow_;  ///< checks in a row, by rank and phase
};

}  // namespace tandem::report
