// Processor time of the machine and of this process, to tell whether other programs ran while
// something was timed.
#pragma once

namespace tandem {

struct ProcessorTime {
  double wall = 0;  ///< seconds on a clock that does not jump
  double all = 0;   ///< seconds that the machine's processors were busy
  double own = 0;   ///< this process's part, its ended children included
  static ProcessorTime now();
};

/// Share of the machine's processors that other programs kept busy in between: 0 to 1, and 0 where
/// the system does not say.
double share_of_others(const ProcessorTime& begin, const ProcessorTime& end);

/// From this share on, times measured meanwhile say too little.
constexpr double kBusyShare = 0.15;

}  // namespace tandem
