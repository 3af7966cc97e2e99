#pragma once

namespace tandem {

/// By what share of its time a candidate must be faster than the first one, and than any other
/// before it, for the tuner to take it instead.
struct Margin {
  double over_first = 0, over_others = 0;
};
/// Where the first one is serial.
inline constexpr Margin kOverSerial{0.02, 0};

}  // namespace tandem
