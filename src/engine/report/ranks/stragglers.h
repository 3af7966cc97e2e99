// Ranks whose own work takes longer than that of their peers, found in the records of a run
// (observe/rank_records.h).
//
// A rank is compared with the ranks of its pipeline stage, which do the same work: by phase and
// frame, its time over the median of theirs. Windows of 50, 100, 200, ... frames are judged: a rank
// is slow if the mean excess of a window's middle half exceeds what noise explains, and is worth a
// share of the step. The noise of a window is that of a mean of values that are correlated over
// some frames; the bound is Student's for all windows, ranks and phases together (Bonferroni), so
// that a run of even ranks names one with a probability near false_alarms, if they do not
// differ by more than a few tenths of a percent for the whole run. Of checkpoints only the frames
// that have one count. Work that moves between ranks by nature, as experts' rows do, is not told
// apart from a slow processor.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "observe/rank_records.h"

namespace tandem::report {

struct Straggler {
  int rank = 0;
  Phase phase{};
  int64_t from_step = 0, to_step = 0;
  double excess = 0;         ///< over its peers: .05 is 5 % longer
  double share_of_step = 0;  ///< the excess over the step's time
};

struct StragglerOptions {
  int window = 50;             ///< frames of the shortest window
  double min_excess = .03;     ///< of a phase
  double min_share = .0025;    ///< of a step
  double false_alarms = .001;  ///< nominal probability in a run of even ranks; measured up to .008
};

/// By share of the step, largest first; of a rank that is slow in several windows, one entry a
/// phase with the largest excess. Its steps are those whose excesses over half of that have the
/// largest sum (a CUSUM). Ranks without a peer are not judged.
std::vector<Straggler> find_stragglers(std::span<const RankHistory> ranks,
                                       const StragglerOptions& options = {});

/// "rank 3 (tp 1, dp 1, pp 0, host a): backward takes 12.1 % longer than on its peers, steps 200 to
/// 450"
std::string describe(const Straggler& straggler, const RankPosition& position);

}  // namespace tandem::report
