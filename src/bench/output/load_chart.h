// Picture of a server under loads: tokens/s against the time between tokens.
#pragma once

#include <span>
#include <string>

namespace tandem {

struct LoadPoint {
  std::string name;  ///< of the load
  double tokens_per_s, p50_ms, p99_ms;
};

/// SVG with a line for the medians of texts and one for their 99th percentiles, on a logarithmic
/// time axis.
std::string load_chart(std::span<const LoadPoint> points);

}  // namespace tandem
