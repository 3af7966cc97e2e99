// Records of runs that were not made: ranks with the noise of recorded ones, and perhaps a slow
// one.
//
// Set by hand after runs of configs/tiny.toml on two processors that other programs used in part.
// Recorded there, of a rank's work over that of its peers: a spread of 1.3 to 3.5 % of a frame with
// 2 ranks of TP, 3 to 11 % with TP and DP, 8 to 43 % with DP only; correlation with the frame
// before mostly 0 to .3. Scenarios have the spread of the first; bursts, hosts' wander and offsets
// of ranks are assumptions.
#pragma once

#include <cstdint>
#include <vector>

#include "observe/rank_records.h"

namespace tandem {

struct RecordScenario {
  uint64_t seed = 0;
  int ranks = 2, stages = 1, ranks_per_host = 8;
  int64_t steps = 200;
  double spread = .015;  ///< of a rank's work in a step, apart from that of all ranks
  bool splits_backward = false;
  bool awaits_data = false;  ///< data takes a share of the step
  int64_t checkpoint_every = 0;
  int slow_rank = -1;  ///< -1: none
  Phase slow_phase{};
  double excess = 0;
  int64_t slow_after = 0;  ///< steps
};

/// Jobs of 2 to 16 ranks with a spread of .5 to 2 %: in every fourth none is slow, else one by 5 %
/// (every second) to 50 % in a random phase after 0 to 300 steps. The records end after 50 frames
/// of the slow phase, or up to 200 steps later.
RecordScenario generate_scenario(uint64_t seed);

/// A step's waits follow from the work: stages of a step end when the last rank has come.
std::vector<RankHistory> generate_records(const RecordScenario& scenario);

}  // namespace tandem
