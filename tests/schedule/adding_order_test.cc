#include "schedule/adding_order.h"

#include <gtest/gtest.h>

namespace tandem::schedule {
namespace {

TEST(AddingOrder, PartsAreSpreadEvenlyBehindAtLeastOneStepEachAndTheLastBehindAll) {
  for (int parts = 1; parts <= 14; ++parts) {
    for (int steps = parts; steps <= 200; ++steps) {
      SCOPED_TRACE(testing::Message() << steps << " steps, " << parts << " parts");
      int before = 0;
      for (int part = 0; part < parts; ++part) {
        const int run = steps_before({steps, parts}, part) - before;
        ASSERT_GE(run, 1);
        ASSERT_TRUE(run == steps / parts || run == (steps + parts - 1) / parts) << part;
        before += run;
      }
      ASSERT_EQ(before, steps);
    }
  }
}

}  // namespace
}  // namespace tandem::schedule
