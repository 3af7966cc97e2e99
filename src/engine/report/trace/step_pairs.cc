#include "engine/report/trace/step_pairs.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "tandem/error.h"

namespace tandem::report {

LinkChoice choose_link(const StepLoad& load) {
  for (const double value : {load.gemm_s, load.step_s, load.sent_bytes}) {
    if (std::isfinite(value) && value > 0) continue;
    throw InvalidArgument(
        fmt::format("a step of {:g} s with {:g} s of GEMMs that sends {:g} bytes: expected "
                    "numbers above 0 to choose a link by (or name one with --link)",
                    load.step_s, load.gemm_s, load.sent_bytes));
  }
  const double rate = load.sent_bytes / load.gemm_s;
  const double digit = std::pow(10, std::floor(std::log10(rate)) - 1);  // two significant digits
  return {std::clamp(std::round(rate / digit) * digit, 1.0, 1e15),
          std::clamp(std::round(load.gemm_s / 2000 * 1e6), 1.0, 30.0) * 1e-6};
}

int64_t choose_pairs(const StepLoad& load) {
  constexpr double kSeconds = 12;
  const double pair = 2 * (load.step_s + load.gemm_s);
  return int64_t(std::clamp(kSeconds / std::max(pair, 1e-9), 24.0, 100.0));
}

double chance_of_wins(int64_t wins, int64_t pairs) {
  double chance = 0;
  for (int64_t i = wins; i <= pairs; ++i) {
    chance += std::exp(std::lgamma(double(pairs) + 1) - std::lgamma(double(i) + 1) -
                       std::lgamma(double(pairs - i) + 1) - double(pairs) * std::log(2.0));
  }
  return std::min(chance, 1.0);
}

Shown compare_pairs(int64_t faster, int64_t slower) {
  const int64_t pairs = faster + slower;
  if (chance_of_wins(faster, pairs) < kChance) return Shown::faster;
  if (chance_of_wins(slower, pairs) < kChance) return Shown::slower;
  return Shown::nothing;
}

}  // namespace tandem::report
