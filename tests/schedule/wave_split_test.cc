#include "schedule/wave_split.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <set>
#include <utility>
#include <vector>

namespace tandem::schedule {
namespace {

// Counts consecutive partial tiles from work item `index` on.
int slices_left(const Waves& waves, const WaveSplit& split, int cluster, int index) {
  int slices = 0;
  while (work_of(waves, split, cluster, index + slices).steps.writes_partial) ++slices;
  return slices;
}

TEST(WaveSplit, EveryStepRunsOnceAndPartialsAreWrittenAndReadOnce) {
  std::set<std::pair<int, int>> kinds;  // tiles, helpers
  for (const int tiles : {1, 5, 20, 30, 40, 48, 66, 70, 92, 105, 120, 121, 126, 160}) {
    for (const int clusters : {1, 5, 66}) {
      for (const int steps : {9, 32, 128, 192}) {
        for (const int added : {0, 6}) {
          for (const bool before : {false, true}) {
            if (before && tiles < clusters) continue;
            Waves waves{tiles, clusters, steps, added, 8, tiles % clusters, before};
            const WaveSplit split = best_split(waves);
            SCOPED_TRACE(testing::Message()
                         << tiles << " tiles, " << clusters << " clusters, " << steps << " steps, "
                         << added << " added, split " << split.tiles << " " << split.helpers << " "
                         << split.begin << " " << split.middle << " " << before);
            std::map<int, std::vector<std::pair<int, int>>> runs;
            std::map<int, int> written, read;  // tile by slot
            for (int cluster = 0; cluster < clusters; ++cluster) {
              for (int i = 0;; ++i) {
                const auto [tile, work] = work_of(waves, split, cluster, i);
                if (work.end == 0) break;
                ASSERT_GE(work.end - work.begin, waves.minimum);
                runs[tile].emplace_back(work.begin, work.end);
                const bool whole = work.begin == 0 && work.end == steps;
                ASSERT_EQ(whole, !work.writes_partial && work.reads_partials == 0);
                ASSERT_TRUE(whole || work.writes_partial == (work.begin > 0));
                if (work.writes_partial) {
                  ASSERT_TRUE(written.emplace(work.partial, tile).second);
                  // A helper never waits for another helper, so no wait lasts forever.
                  for (int j = 0; j < i + 9; ++j) {
                    ASSERT_EQ(work_of(waves, split, cluster, j).steps.reads_partials, 0);
                  }
                  // Partial tiles precede a cluster's whole tiles, or follow all of them.
                  ASSERT_EQ(before, work_of(waves, split, cluster,
                                            i + slices_left(waves, split, cluster, i))
                                            .steps.end != 0);
                }
                for (int b = 0; b < work.reads_partials; ++b) {
                  ASSERT_TRUE(read.emplace(work.partial + b, tile).second);
                }
              }
            }
            ASSERT_EQ(int(runs.size()), tiles);
            ASSERT_TRUE(runs.begin()->first == 0 && runs.rbegin()->first + 1 == tiles);
            for (auto& [tile, ranges] : runs) {
              std::sort(ranges.begin(), ranges.end());
              int done = 0;
              for (const auto& [begin, end] : ranges) {
                ASSERT_EQ(begin, done);
                done = end;
              }
              ASSERT_EQ(done, steps);
            }
            ASSERT_EQ(written, read);
            const int slots = partial_slots(waves, split);
            ASSERT_EQ(int(written.size()), slots);
            ASSERT_TRUE(written.empty() ||
                        (written.begin()->first == 0 && written.rbegin()->first + 1 == slots));
            if (split.tiles > 0) kinds.insert({split.tiles, split.helpers});
          }
        }
      }
    }
  }
  for (const auto& kind :
       {std::pair{1, 1}, {1, 2}, {1, 3}, {2, 1}, {3, 1}, {5, 1}, {10, 1}, {3, 2}, {2, 3}}) {
    EXPECT_TRUE(kinds.contains(kind)) << kind.first << " " << kind.second;
  }
}

static_assert(swept_rows(16, 8) == 8 && swept_rows(12, 8) == 6 && swept_rows(9, 8) == 9);

}  // namespace
}  // namespace tandem::schedule
