#pragma once

namespace tandem {

/// Fraction by which a candidate's time must be below that of the first candidate, and of any other
/// before it, for the tuner to choose it instead.
struct Margin {
  double over_first = 0, over_others = 0;
};
/// Margins if the first candidate is serial.
inline constexpr Margin kOverSerial{0.02, 0};

}  // namespace tandem
