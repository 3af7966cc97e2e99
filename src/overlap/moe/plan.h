// How one stage of a Mixture-of-Experts layer runs: what the tuner chooses between. Every plan of
// one wire format gives the same bits.
#pragma once

#include <string>

#include "tune/candidate.h"

namespace tandem {

struct MoePlan {
  bool overlapped = false;
  int chunks = 1;  ///< waves of remote rows (dispatch), groups of columns (combine)
  Wire wire = {};  ///< what rows travel as: none, or the one that the layer was made for
  Strategy strategy() const { return overlapped ? Strategy::overlapped : Strategy::serial; }
  /// As candidates are named: "overlapped, 3 chunks", "serial, 1 chunk as int8".
  std::string describe() const;
};

}  // namespace tandem
