#include "schedule/adding_order.h"

#include <gtest/gtest.h>

namespace tandem::schedule {
namespace {

TEST(AddingOrder, PartsAreSpreadEvenlyBehindTheLeadAndTheLastBehindAll) {
  for (const int lead : {0, 1, 4}) {
    for (int parts = 1; parts <= 14; ++parts) {
      for (int steps = lead; steps <= 200; ++steps) {
        SCOPED_TRACE(testing::Message()
                     << lead << ", " << steps << " steps, " << parts << " parts");
        const int spread = steps - lead;
        int before = lead;
        for (int part = 0; part < parts; ++part) {
          const int run = steps_before({steps, parts, lead}, part) - before;
          ASSERT_TRUE(run == spread / parts || run == (spread + parts - 1) / parts) << part;
          before += run;
        }
        ASSERT_EQ(before, steps);
      }
    }
  }
}

}  // namespace
}  // namespace tandem::schedule
