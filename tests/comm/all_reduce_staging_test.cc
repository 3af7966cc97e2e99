#include "collectives/all_reduce_staging.h"

#include <gtest/gtest.h>

namespace tandem::test {
namespace {

constexpr int64_t kMiB = int64_t(1) << 20;

TEST(AllReduceStagingTest, IsEmptyForTensorsThatNoKernelReduces) {
  for (const int ranks : {2, 4, 8}) {
    EXPECT_EQ(staging_for(32 * kMiB + 16, ranks, 0).bytes(ranks), 0) << ranks;
    EXPECT_EQ(staging_for(512 * kMiB, ranks, 64 * kMiB).bytes(ranks), 0) << ranks;
    EXPECT_EQ(staging_for_up_to(512 * kMiB, ranks, 0).capacity, 32 * kMiB) << ranks;
  }
  EXPECT_EQ(staging_for(kMiB, 1, 0).bytes(1), 0);
}

TEST(AllReduceStagingTest, FitsTensorsThatAKernelReduces) {
  for (const int ranks : {2, 3, 4, 8}) {
    for (const int64_t bytes : {int64_t(0), int64_t(16), kMiB, 5 * kMiB + 16, 32 * kMiB}) {
      const AllReduceStaging staging = staging_for(bytes, ranks, 0);
      EXPECT_GE(staging.capacity, bytes);
      EXPECT_LT(staging.capacity, bytes + 128);
      EXPECT_GE(staging.slot_bytes * ranks, bytes) << ranks << " " << bytes;
      EXPECT_GE(staging.slot_bytes, std::min(bytes, kOneShotBytes));
      EXPECT_EQ(staging.slot_bytes % 128, 0);
      EXPECT_LE(staging.bytes(ranks),
                4 * ranks * std::max(bytes / ranks + 400, std::min(bytes + 128, kOneShotBytes)));
    }
  }
}

TEST(AllReduceStagingTest, FitsWholeRowsOfAShard) {
  EXPECT_GE(staging_for(3 * kMiB, 2, 2 * kMiB).slot_bytes, 2 * kMiB);
}

}  // namespace
}  // namespace tandem::test
