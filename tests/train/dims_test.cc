#include "engine/parallel/dims.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <set>

#include "tandem/error.h"

namespace tandem {
namespace {

constexpr Axis kAxes[] = {Axis::tp, Axis::dp, Axis::experts, Axis::expert_dp};

std::vector<ParallelDims> all_dims() {
  std::vector<ParallelDims> all;
  for (const int tp : {1, 2, 3, 8}) {
    for (const int dp : {1, 2, 4, 6}) {
      for (int ep = 1; ep <= dp; ++ep) {
        if (dp % ep == 0) all.push_back({tp, dp, ep});
      }
    }
  }
  return all;
}

TEST(ParallelDims, CoordinatesAreUniqueAndTensorParallelRanksContiguous) {
  for (const ParallelDims& dims : all_dims()) {
    for (int rank = 0; rank < dims.ranks(); ++rank) {
      const auto at = dims.coordinates(rank);
      EXPECT_EQ(rank, at.tp + dims.tp() * at.dp) << dims.describe();
      EXPECT_EQ(at.dp, at.ep + dims.ep() * at.expert_dp) << dims.describe();
      EXPECT_LT(at.tp, dims.tp());
      EXPECT_LT(at.ep, dims.ep());
    }
  }
}

// Ranks of a group have the same group number and the indices 0 … size - 1 in rank order.
TEST(ParallelDims, GroupsOfEachAxisPartitionTheWorld) {
  for (const ParallelDims& dims : all_dims()) {
    for (const Axis axis : kAxes) {
      std::map<int, int> next;  // index by group
      for (int rank = 0; rank < dims.ranks(); ++rank) {
        EXPECT_EQ(dims.index(axis, rank), next[dims.group(axis, rank)]++) << dims.describe();
      }
      EXPECT_EQ(int(next.size()) * dims.size(axis), dims.ranks());
      for (const auto& [group, size] : next) EXPECT_EQ(size, dims.size(axis));
    }
  }
}

TEST(ParallelDims, RanksOfAGroupDifferOnlyInItsCoordinates) {
  for (const ParallelDims& dims : all_dims()) {
    for (int a = 0; a < dims.ranks(); ++a) {
      for (int b = 0; b < dims.ranks(); ++b) {
        const auto at = dims.coordinates(a), other = dims.coordinates(b);
        const auto same = [&](Axis axis) { return dims.group(axis, a) == dims.group(axis, b); };
        EXPECT_EQ(same(Axis::tp), at.dp == other.dp);
        EXPECT_EQ(same(Axis::dp), at.tp == other.tp);
        EXPECT_EQ(same(Axis::experts), at.expert_dp == other.expert_dp);
        EXPECT_EQ(same(Axis::expert_dp), at.tp == other.tp && at.ep == other.ep);
      }
    }
  }
}

TEST(ParallelDims, InvalidSizesAreRefused) {
  for (const auto& [tp, dp, ep] : {std::tuple{0, 1, 1}, {1, 0, 1}, {1, 1, 0}, {1, 4, 3}}) {
    EXPECT_THROW(ParallelDims(tp, dp, ep), InvalidArgument);
  }
}

TEST(ParallelGroups, SumAlongTheWorldAxesIsOverTheWorld) {
  WorldOptions options;
  options.ranks = 8;
  run_threads(options, [](Communicator& world) {
    const ParallelGroups groups(world, {2, 4, 2}, true);
    EXPECT_EQ(groups.experts()->size(), 4);
    EXPECT_EQ(groups.expert_dp()->size(), 2);
    std::set<int> seen{world.rank()};
    for (Communicator* axis : groups.world_axes()) {
      std::set<int> next;
      const std::vector<int> local(seen.begin(), seen.end());
      for (const auto& blob : axis->exchange(std::as_bytes(std::span(local)), "ranks")) {
        const auto* ranks = reinterpret_cast<const int*>(blob.data());
        next.insert(ranks, ranks + blob.size() / sizeof(int));
      }
      seen = next;
    }
    EXPECT_EQ(seen.size(), 8u);
  });
}

TEST(ParallelGroups, WorldOfAnotherSizeIsRefused) {
  run_threads({}, [](Communicator& world) {
    try {
      const ParallelGroups groups(world, {2, 3}, false);
      FAIL();
    } catch (const InvalidArgument& error) {
      EXPECT_STREQ(error.what(), "world of 1 ranks: expected tp x dp = 2 x 3 = 6");
    }
  });
}

}  // namespace
}  // namespace tandem
