#include "engine/parallel/dims.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <set>

#include "tandem/error.h"

namespace tandem {
namespace {

constexpr Axes kGroups[] = {
    kTp, kCp, kDp, kCopies, kExperts, kExpertDp, kExpertCopies, {}, {Axis::tp, Axis::expert_dp}};

std::vector<ParallelDims> all_dims() {
  std::vector<ParallelDims> all;
  for (const int tp : {1, 2, 3, 8}) {
    for (const int dp : {1, 2, 4, 6}) {
      for (int ep = 1; ep <= dp; ++ep) {
        for (const int cp : {1, 2}) {
          if (dp % ep == 0) all.push_back({tp, dp, ep, 1, 1, cp});
        }
      }
    }
  }
  return all;
}

TEST(ParallelDims, CoordinatesAreThoseOfMegatronsOrder) {
  for (const ParallelDims& dims : all_dims()) {
    for (int rank = 0; rank < dims.ranks(); ++rank) {
      EXPECT_EQ(dims.index(kTp, rank), rank % dims.tp()) << dims.describe();
      const int of_replica = dims.tp() * dims.cp();
      EXPECT_EQ(dims.index(kCp, rank), rank / dims.tp() % dims.cp());
      EXPECT_EQ(dims.index(kCopies, rank), rank / dims.tp());
      EXPECT_EQ(dims.index(kDp, rank), rank / of_replica);
      EXPECT_EQ(dims.index(kExperts, rank),
                rank % dims.tp() + rank / of_replica % dims.ep() * dims.tp());
      EXPECT_EQ(dims.index(kExpertDp, rank), rank / (of_replica * dims.ep()));
      EXPECT_EQ(dims.group(kTp, rank), rank / dims.tp());
      EXPECT_EQ(dims.group(kDp, rank), rank % of_replica);
    }
  }
}

TEST(ParallelDims, MicrobatchesHaveTheSamplesOfAllReplicas) {
  const ParallelDims dims(2, 3, 1, 2);  // replicas have samples 0 to 3, 4 to 7 and 8 to 11
  std::vector<int64_t> samples;
  for (int64_t position = 0; position < 12; ++position) {
    samples.push_back(dims.sample_at(12, 2, position));
    EXPECT_EQ(dims.microbatch_position(12, 2, samples.back()), position);
  }
  EXPECT_THAT(samples, ::testing::ElementsAre(0, 1, 4, 5, 8, 9, 2, 3, 6, 7, 10, 11));
}

TEST(ParallelDims, MembersAreTheRanksOfAGroupByIndex) {
  std::vector<ParallelDims> all = all_dims();
  all.emplace_back(2, 4, 2, 3);
  all.emplace_back(2, 2, 2, 2, 3);
  all.emplace_back(2, 2, 2, 2, 3, 2);
  for (const ParallelDims& dims : all) {
    for (const Axes axes : {kTp, kCp, kDp, kCopies, kPp, kSync, kExperts, kExpertCopies, Axes{}}) {
      for (int rank = 0; rank < dims.ranks(); ++rank) {
        const std::vector<int> members = dims.members(axes, rank);
        ASSERT_EQ(int(members.size()), dims.size(axes)) << dims.describe();
        EXPECT_EQ(members[size_t(dims.index(axes, rank))], rank);
        for (size_t i = 0; i < members.size(); ++i) {
          EXPECT_EQ(dims.group(axes, members[i]), dims.group(axes, rank)) << dims.describe();
          EXPECT_EQ(dims.index(axes, members[i]), int(i));
        }
      }
    }
  }
}

TEST(ParallelDims, LearnersAreConsecutiveRanksAndHaveConsecutiveSamples) {
  const ParallelDims dims(2, 2, 1, 2, 3), of_one(2, 2, 1, 2);
  EXPECT_EQ(dims.ranks(), 3 * of_one.ranks());
  for (int rank = 0; rank < dims.ranks(); ++rank) {
    EXPECT_EQ(dims.learner(rank), rank / of_one.ranks());
    EXPECT_EQ(dims.index(kDp, rank), of_one.index(kDp, rank % of_one.ranks()));
  }
  EXPECT_EQ(dims.local_batch(24), 4);
  for (int64_t position = 0; position < 24; ++position) {
    const int64_t sample = dims.sample_at(24, 2, position);
    EXPECT_EQ(sample, position / 8 * 8 + of_one.sample_at(8, 2, position % 8));
    EXPECT_EQ(dims.microbatch_position(24, 2, sample), position);
  }
}

// Ranks of a group have the same group number and the indices 0 … size - 1 in rank order.
TEST(ParallelDims, GroupAndIndexGiveTheRank) {
  for (const ParallelDims& dims :
       {ParallelDims(2, 4, 2, 3), ParallelDims(3, 2, 1, 1), ParallelDims(2, 2, 2, 2, 1, 3)}) {
    for (int rank = 0; rank < dims.ranks(); ++rank) {
      for (const Axes axes : {kTp, kCp, kDp, kCopies, kExperts, kExpertDp, kPp}) {
        EXPECT_EQ(dims.rank_of(axes, dims.group(axes, rank), dims.index(axes, rank)), rank);
      }
    }
  }
}

TEST(ParallelDims, GroupsOfEachAxisPartitionTheWorld) {
  for (const ParallelDims& dims : all_dims()) {
    for (const Axes axes : kGroups) {
      std::map<int, int> next;  // index by group
      for (int rank = 0; rank < dims.ranks(); ++rank) {
        EXPECT_EQ(dims.index(axes, rank), next[dims.group(axes, rank)]++) << dims.describe();
      }
      EXPECT_EQ(int(next.size()) * dims.size(axes), dims.ranks());
      for (const auto& [group, size] : next) EXPECT_EQ(size, dims.size(axes));
    }
  }
}

TEST(ParallelDims, RanksOfAGroupDifferOnlyOnItsAxes) {
  constexpr Axis kEach[] = {Axis::tp, Axis::cp, Axis::ep, Axis::expert_dp};
  for (const ParallelDims& dims : all_dims()) {
    for (const Axes axes : kGroups) {
      for (int a = 0; a < dims.ranks(); ++a) {
        for (int b = 0; b < dims.ranks(); ++b) {
          bool same = true;
          for (const Axis axis : kEach) {
            same &= axes.has(int(axis)) || dims.index({axis}, a) == dims.index({axis}, b);
          }
          ASSERT_EQ(dims.group(axes, a) == dims.group(axes, b), same) << dims.describe();
        }
      }
    }
  }
}

TEST(ParallelDims, InvalidSizesAreRefused) {
  for (const auto& [tp, dp, ep] : {std::tuple{0, 1, 1}, {1, 0, 1}, {1, 1, 0}, {1, 4, 3}}) {
    EXPECT_THROW(ParallelDims(tp, dp, ep), InvalidArgument);
  }
  EXPECT_THROW(ParallelDims(1, 1, 1, 1, 1, 0), InvalidArgument);
}

// Every gradient is of one rank and round, and a group of copies has each of its own once.
TEST(ParallelDims, GradientsAreOfLogicalReplicasAndContextRanks) {
  ParallelConfig parallel;
  parallel.dp = 4, parallel.ep = 2, parallel.cp = 3, parallel.replicas = 6;
  const ParallelDims dims(parallel);
  EXPECT_EQ(dims.num_gradients(), 18);
  for (const Axes axes : {kCopies, kExpertCopies}) {
    for (int rank = 0; rank < dims.ranks(); ++rank) {
      const std::vector<int> gradients = dims.gradients(axes, rank);
      EXPECT_TRUE(std::ranges::is_sorted(gradients));
      EXPECT_EQ(int(gradients.size()), axes == kCopies ? 18 : 9);
      for (int round = 0; round < dims.rounds(); ++round) {
        const int replica = dims.replica(round, rank);
        if (replica < 0) continue;
        const size_t at = size_t(round * dims.size(axes) + dims.index(axes, rank));
        EXPECT_EQ(gradients.at(at), replica * dims.cp() + dims.index(kCp, rank));
      }
    }
  }
}

TEST(ParallelGroups, SumAlongTheWorldAxesIsOverTheWorld) {
  WorldOptions options;
  options.ranks = 8;
  run_threads(options, [](Communicator& world) {
    for (const ParallelDims& dims :
         {ParallelDims(2, 4, 2), ParallelDims(2, 2, 2, 1, 2), ParallelDims(2, 2, 2, 1, 1, 2)}) {
      const ParallelGroups groups(world, dims, true);
      EXPECT_EQ(groups.experts()->size(), 4);
      EXPECT_EQ(groups.expert_copies()->size(), dims.learners() == 1 ? 2 : 1);
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
    }
  });
}

TEST(ParallelGroups, WorldOfAnotherSizeIsRefused) {
  run_threads({}, [](Communicator& world) {
    try {
      const ParallelGroups groups(world, {2, 3}, false);
      FAIL();
    } catch (const InvalidArgument& error) {
      EXPECT_STREQ(error.what(), "world of 1 ranks: expected tp x dp x pp = 2 x 3 x 1 = 6");
    }
  });
}

}  // namespace
}  // namespace tandem
