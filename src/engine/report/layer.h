// One layer out of a trace of many: short enough to be drawn.
#pragma once

#include <span>
#include <vector>

#include "observe/trace.h"

namespace tandem {

/// The events in one layer of the forward pass, cut at its ends: the second repetition of the
/// shortest sequence of operations that rank 0's computation repeats; all events when nothing
/// repeats. Times count from its begin and origins are zero.
struct Layer {
  std::chrono::nanoseconds span{0};
  bool repeats = false;  ///< else these are all events
  std::vector<RankEvents> ranks;
};
Layer one_layer(std::span<const RankEvents> ranks);

}  // namespace tandem
