// Plan of one stage of a Mixture-of-Experts layer, chosen by the tuner. Every plan of one wire
// format gives the same bits.
#pragma once

#include <string>

#include "tune/candidate.h"

namespace tandem {

struct MoePlan {
  bool overlapped = false;
  int chunks = 1;  ///< waves of remote rows (dispatch), groups of columns (combine)
  Wire wire = {};  ///< wire format of rows: none, or that of the layer
  Strategy strategy() const { return overlapped ? Strategy::overlapped : Strategy::serial; }
  /// Name as a candidate: "overlapped, 3 chunks", "serial, 1 chunk as int8".
  std::string describe() const;
};

}  // namespace tandem
