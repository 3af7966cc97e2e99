// Processor time of the machine and of this process, to detect other programs during a measurement.
#pragma once

namespace tandem {

struct ProcessorTime {
  double wall = 0;     ///< seconds of a monotonic clock
  double all = 0;      ///< busy seconds of all processors
  double process = 0;  ///< this process's part, including its ended children
  static ProcessorTime now();
};

/// Share of the machine's processor time that other programs used between `begin` and `end`: 0 to
/// 1; 0 if not reported.
double external_share(const ProcessorTime& begin, const ProcessorTime& end);

/// Max share for times to be trusted.
constexpr double kBusyShare = 0.15;

}  // namespace tandem
