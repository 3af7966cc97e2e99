// Decisions of the comparison of serial and overlapped steps: the link it emulates, the number of
// pairs of steps, and whether the pairs show a difference.
#pragma once

#include <cstdint>

namespace tandem::report {

/// Time and bytes of a step of one rank, of the training that the comparison belongs to.
struct StepLoad {
  double gemm_s = 0, step_s = 0;
  double sent_bytes = 0;
};

struct LinkChoice {
  double bytes_per_s = 0, latency_s = 0;
};

/// Link on which the bytes of a step take as long as its GEMMs, which can hide no more, with a
/// latency of 1/2000 of that time, 1 to 30 us. Throws InvalidArgument unless all of `load` is
/// positive and finite.
LinkChoice choose_link(const StepLoad& load);

/// Number of pairs of steps to time: what about 12 s allow on that link, 24 to 100.
int64_t choose_pairs(const StepLoad& load);

enum class Shown { faster, slower, nothing };

/// Chance below which a difference counts as shown.
constexpr double kChance = 0.01;

/// Sign test: probability that at least `wins` of `pairs` go one way if both ways are equally
/// likely. 1 without pairs. Requires 0 <= wins <= pairs.
double chance_of_wins(int64_t wins, int64_t pairs);

/// Whether overlapped steps are faster or slower, by their numbers of faster and slower pairs.
Shown compare_pairs(int64_t faster, int64_t slower);

}  // namespace tandem::report
