#include "schedule/slice_order.h"

#include <gtest/gtest.h>

namespace tandem::schedule {
namespace {

TEST(SliceOrder, ChunksAreSpreadEvenlyAfterTheLeadAndLastSourcesComeAfterAllSteps) {
  for (const int lead : {0, 1, 4}) {
    for (const int late : {1, 2, 6, 14}) {
      for (int num_slices = late; num_slices <= 14; ++num_slices) {
        for (int steps = lead; steps <= 200; ++steps) {
          SCOPED_TRACE(testing::Message() << lead << ", " << steps << " steps, " << num_slices
                                          << " slices, " << late << " of them late");
          const SliceOrder order{steps, num_slices, lead, late};
          const int spread = steps - lead, runs = num_slices - late + 1;
          int before = lead;
          for (int slice = 0; slice < runs; ++slice) {
            const int run = steps_before(order, slice) - before;
            ASSERT_TRUE(run == spread / runs || run == (spread + runs - 1) / runs) << slice;
            before += run;
          }
          for (int slice = num_slices - late; slice < num_slices; ++slice) {
            ASSERT_EQ(steps_before(order, slice), steps) << slice;
          }
        }
      }
    }
  }
}

TEST(SliceOrder, TileIsStoredInOrderWithinTheLead) {
  for (int every = 1; every <= 40; ++every) {
    for (int shift = 0; shift < 100; ++shift) {
      int before = -1;
      for (int box = 0; box < 4; ++box) {
        const int at = store_step(every, shift, box);
        ASSERT_TRUE(box == 0 || at == before + every);
        ASSERT_TRUE(at > before && at < (box + 1) * every);
        before = at;
      }
      ASSERT_EQ(store_step(every, shift, 0), shift % every);
    }
  }
}

}  // namespace
}  // namespace tandem::schedule
