#include "bench/efficiency.h"

#include <algorithm>
#include <limits>

#include "tandem/random.h"
#include "tune/measure.h"

namespace tandem {
namespace {

double ect(const std::vector<double>& call, const std::vector<double>& gemm, EctOf how) {
  if (how == EctOf::medians) return median(call) - median(gemm);
  std::vector<double> more(call.size());
  for (size_t round = 0; round < call.size(); ++round) more[round] = call[round] - gemm[round];
  return median(std::move(more));
}

}  // namespace

double Exposed::efficiency() const {
  return serial_us > 0 ? 1 - overlapped_us / serial_us : -std::numeric_limits<double>::infinity();
}

Exposed exposed(const RoundTimes& rounds, EctOf how) {
  return {ect(rounds.serial, rounds.gemm, how), ect(rounds.overlapped, rounds.gemm, how)};
}

std::optional<EfficiencyRange> efficiency_range(const RoundTimes& rounds, EctOf how) {
  const size_t count = rounds.gemm.size();
  if (count < 5) return std::nullopt;
  // Many rounds need fewer draws for an equally stable range, and each takes longer.
  const size_t draws = std::clamp<size_t>(200'000 / count, 100, 1000), outside = draws / 40;
  std::vector<double> efficiencies;
  RoundTimes drawn = rounds;
  for (uint64_t draw = 0; draw < draws; ++draw) {
    for (size_t i = 0; i < count; ++i) {
      const size_t round = philox(1, draw, i)[0] % count;
      drawn.gemm[i] = rounds.gemm[round];
      drawn.serial[i] = rounds.serial[round];
      drawn.overlapped[i] = rounds.overlapped[round];
    }
    efficiencies.push_back(exposed(drawn, how).efficiency());
  }
  std::sort(efficiencies.begin(), efficiencies.end());
  return EfficiencyRange{efficiencies[outside], efficiencies[draws - 1 - outside]};
}

}  // namespace tandem
