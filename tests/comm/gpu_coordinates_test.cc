// Reachability between a world's GPUs, with simulated answers of CUDA.
#include "comm/device/gpu_coordinates.h"

#include <gtest/gtest.h>

#include <set>
#include <string>
#include <vector>

namespace tandem::test {
namespace {

const std::vector<std::string> kVisible{"a", "b", "c", "d"};

// Paths from GPU `device` of kVisible to the others: all reachable except `unreached`, with atomics
// except `copies`.
auto paths(std::set<std::string> unreached, std::set<std::string> copies = {}) {
  return [=](int device) {
    const std::string& other = kVisible[size_t(device)];
    const bool reaches = !unreached.contains(other);
    return GpuPath{reaches, reaches && !copies.contains(other)};
  };
}

TEST(GpuCoordinatesTest, HostsOfOneNameAreDistinguishedByBootId) {
  EXPECT_EQ(node_identity(nullptr, "gpu1", "b7"), node_identity("", "gpu1", "b7"));
  EXPECT_NE(node_identity(nullptr, "gpu1", "b7"), node_identity(nullptr, "gpu1", "b8"));
  EXPECT_NE(node_identity(nullptr, "gpu1", "b7"), node_identity(nullptr, "gpu2", "b7"));
  EXPECT_EQ(node_identity("node0", "gpu1", "b7"), node_identity("node0", "gpu2", "b8"));
  EXPECT_EQ(this_node(), this_node());
}

TEST(GpuCoordinatesTest, GpusWithoutRanksAreIgnored) {
  const std::vector<GpuCoordinates> ranks{{"n", "a"}, {"n", "c"}};
  const GpuPath path = path_to_all(ranks, 0, kVisible, paths({"b", "d"}, {"b", "d"}));
  EXPECT_TRUE(path.reaches);
  EXPECT_TRUE(path.atomics);
}

TEST(GpuCoordinatesTest, EveryPeerGpuMustBeReachable) {
  const std::vector<GpuCoordinates> ranks{{"n", "d"}, {"n", "a"}, {"n", "b"}};
  EXPECT_TRUE(path_to_all(ranks, 1, kVisible, paths({})).reaches);
  EXPECT_FALSE(path_to_all(ranks, 1, kVisible, paths({"b"})).reaches);
  EXPECT_FALSE(path_to_all(ranks, 1, kVisible, paths({"d"})).reaches);
  const GpuPath copied = path_to_all(ranks, 1, kVisible, paths({}, {"d"}));
  EXPECT_TRUE(copied.reaches);
  EXPECT_FALSE(copied.atomics);
}

TEST(GpuCoordinatesTest, GpusOfOtherNodesAndInvisibleGpusAreUnreachable) {
  const std::vector<GpuCoordinates> nodes{{"n", "a"}, {"m", "b"}};
  EXPECT_FALSE(path_to_all(nodes, 0, kVisible, paths({})).reaches);
  const std::vector<GpuCoordinates> ranks{{"n", "a"}, {"n", "b"}};
  EXPECT_FALSE(path_to_all(ranks, 0, std::vector<std::string>{"a"}, paths({})).reaches);
}

TEST(GpuCoordinatesTest, SingleRankReachesAll) {
  const std::vector<GpuCoordinates> alone{{"n", "a"}};
  const GpuPath path = path_to_all(alone, 0, kVisible, paths({"b", "c", "d"}));
  EXPECT_TRUE(path.reaches);
  EXPECT_TRUE(path.atomics);
}

TEST(GpuCoordinatesTest, RanksThatShareAGpuAreFound) {
  EXPECT_FALSE(shared_gpu(std::vector<GpuCoordinates>{{"n", "a"}, {"n", "b"}}));
  const auto shared = shared_gpu(std::vector<GpuCoordinates>{{"n", "a"}, {"n", "b"}, {"m", "b"}});
  ASSERT_TRUE(shared);
  EXPECT_EQ(shared->first, 1);
  EXPECT_EQ(shared->second, 2);
}

}  // namespace
}  // namespace tandem::test
