// Exposed communication and overlap efficiency from rounds of noisy times. ECT is the time of a
// call beyond its bare GEMM, and E = 1 - ECT(overlapped) / ECT(serial) the share of the serial
// form's ECT that is hidden (FLUX, section 2.3).
#pragma once

#include <optional>
#include <vector>

namespace tandem {

/// Microseconds; round i of all three was timed together.
struct RoundTimes {
  std::vector<double> gemm, serial, overlapped;
};

/// Two estimates of ECT from the rounds. The median of the rounds' differences is robust against
/// drifting machine speed; the difference of the medians matches a table of medians.
enum class EctOf { differences, medians };

struct Exposed {
  double serial_us = 0, overlapped_us = 0;
  /// Minus infinity if the serial form exposes nothing.
  double efficiency() const;
};

Exposed exposed(const RoundTimes& rounds, EctOf how);

/// 95 % confidence interval of E, from draws with replacement of as many rounds (the percentile
/// bootstrap; Efron, 1979). Deterministic for the same rounds. Ignores that these rounds also
/// selected the fastest candidate.
struct EfficiencyRange {
  double low = 0, high = 0;
  /// Whether E is meaningful: the serial form's ECT exceeds the noise.
  bool is_narrow() const { return high - low < 1; }
};
/// Requires at least 5 rounds, else nullopt: fewer do not show their noise.
std::optional<EfficiencyRange> efficiency_range(const RoundTimes& rounds, EctOf how);

}  // namespace tandem
