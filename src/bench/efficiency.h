// Exposed communication and overlap efficiency out of rounds of noisy times. ECT is what a call
// takes longer than its GEMM alone, and E = 1 - ECT(overlapped) / ECT(serial) the share of the
// serial form's that is hidden (FLUX, section 2.3).
#pragma once

#include <optional>
#include <vector>

namespace tandem {

/// Microseconds; round i of all three was timed together.
struct RoundTimes {
  std::vector<double> gemm, serial, overlapped;
};

/// Two ways to get one ECT out of the rounds. The median of the rounds' differences is not blurred
/// by a machine whose speed drifts; the difference of the medians is what a table of them shows.
enum class EctOf { differences, medians };

struct Exposed {
  double serial_us = 0, overlapped_us = 0;
  /// Minus infinity where the serial form exposes nothing.
  double efficiency() const;
};

Exposed exposed(const RoundTimes& rounds, EctOf how);

/// Between which E lies for 95 of 100 draws, with replacement, of as many rounds (the percentile
/// bootstrap; Efron, 1979). The same for the same rounds. That a way was chosen as the fastest by
/// these rounds is not drawn again.
struct EfficiencyRange {
  double low = 0, high = 0;
  /// Whether E says something, as the serial form's ECT stands out of the noise.
  bool is_narrow() const { return high - low < 1; }
};
/// Of 5 rounds at least: fewer say nothing about their noise.
std::optional<EfficiencyRange> efficiency_range(const RoundTimes& rounds, EctOf how);

}  // namespace tandem
