#pragma once

namespace tandem {

/// By what share of its time a candidate must be faster than the first one, and than any other
/// before it, for the tuner to take it instead.
struct Margin {
  double over_first = 0.02, over_others = 0;
};

}  // namespace tandem
