// How one stage of a Mixture-of-Experts layer runs: what the tuner chooses between. Every plan
// gives the same bits.
#pragma once

#include <string>

#include "tune/candidate.h"

namespace tandem {

struct MoePlan {
  bool overlapped = false;
  int chunks = 1;  ///< waves of remote rows (dispatch), groups of columns (combine)
  Strategy strategy() const { return overlapped ? Strategy::overlapped : Strategy::serial; }
  /// As candidates are named: "overlapped, 3 chunks".
  std::string describe() const;
};

}  // namespace tandem
