// Which of a world's GPUs reach each other, as CUDA says it of made-up machines.
#include "comm/device/gpu_place.h"

#include <gtest/gtest.h>

#include <set>
#include <string>
#include <vector>

namespace tandem::test {
namespace {

const std::vector<std::string> kVisible{"a", "b", "c", "d"};

// From GPU `device` of kVisible to another: all but `unreached`, with atomics but for `copies`.
auto paths(std::set<std::string> unreached, std::set<std::string> copies = {}) {
  return [=](int device) {
    const std::string& other = kVisible[size_t(device)];
    const bool reaches = !unreached.contains(other);
    return GpuPath{reaches, reaches && !copies.contains(other)};
  };
}

TEST(GpuPlaceTest, HostsOfOneNameAreToldApartByTheirKernels) {
  EXPECT_EQ(node_identity(nullptr, "gpu1", "b7"), node_identity("", "gpu1", "b7"));
  EXPECT_NE(node_identity(nullptr, "gpu1", "b7"), node_identity(nullptr, "gpu1", "b8"));
  EXPECT_NE(node_identity(nullptr, "gpu1", "b7"), node_identity(nullptr, "gpu2", "b7"));
  EXPECT_EQ(node_identity("node0", "gpu1", "b7"), node_identity("node0", "gpu2", "b8"));
  EXPECT_EQ(this_node(), this_node());
}

TEST(GpuPlaceTest, AGpuOfNoRankDoesNotCount) {
  const std::vector<GpuPlace> ranks{{"n", "a"}, {"n", "c"}};
  const GpuPath path = path_to_all(ranks, 0, kVisible, paths({"b", "d"}, {"b", "d"}));
  EXPECT_TRUE(path.reaches);
  EXPECT_TRUE(path.atomics);
}

TEST(GpuPlaceTest, EveryOtherRanksGpuCounts) {
  const std::vector<GpuPlace> ranks{{"n", "d"}, {"n", "a"}, {"n", "b"}};
  EXPECT_TRUE(path_to_all(ranks, 1, kVisible, paths({})).reaches);
  EXPECT_FALSE(path_to_all(ranks, 1, kVisible, paths({"b"})).reaches);
  EXPECT_FALSE(path_to_all(ranks, 1, kVisible, paths({"d"})).reaches);
  const GpuPath copied = path_to_all(ranks, 1, kVisible, paths({}, {"d"}));
  EXPECT_TRUE(copied.reaches);
  EXPECT_FALSE(copied.atomics);
}

TEST(GpuPlaceTest, AGpuOfAnotherNodeOrThatIsNotSeenIsNotReached) {
  const std::vector<GpuPlace> nodes{{"n", "a"}, {"m", "b"}};
  EXPECT_FALSE(path_to_all(nodes, 0, kVisible, paths({})).reaches);
  const std::vector<GpuPlace> ranks{{"n", "a"}, {"n", "b"}};
  EXPECT_FALSE(path_to_all(ranks, 0, std::vector<std::string>{"a"}, paths({})).reaches);
}

TEST(GpuPlaceTest, ARankAloneReachesAll) {
  const std::vector<GpuPlace> alone{{"n", "a"}};
  const GpuPath path = path_to_all(alone, 0, kVisible, paths({"b", "c", "d"}));
  EXPECT_TRUE(path.reaches);
  EXPECT_TRUE(path.atomics);
}

TEST(GpuPlaceTest, RanksOfOneGpuAreFound) {
  EXPECT_FALSE(shared_gpu(std::vector<GpuPlace>{{"n", "a"}, {"n", "b"}}));
  const auto shared = shared_gpu(std::vector<GpuPlace>{{"n", "a"}, {"n", "b"}, {"m", "b"}});
  ASSERT_TRUE(shared);
  EXPECT_EQ(shared->first, 1);
  EXPECT_EQ(shared->second, 2);
}

}  // namespace
}  // namespace tandem::test
