// Extraction of one layer from a trace of many, short enough to be drawn.
#pragma once

#include <span>
#include <vector>

#include "observe/trace.h"

namespace tandem {

/// Events in one layer of the forward pass, clipped to it: the second repetition of the shortest
/// sequence of operations that rank 0's computation repeats; all events if none repeats. Times
/// count from the layer's begin and origins are zero.
struct Layer {
  std::chrono::nanoseconds span{0};
  bool repeats = false;  ///< false: contains all events
  std::vector<RankEvents> ranks;
};
Layer one_layer(std::span<const RankEvents> ranks);

}  // namespace tandem
