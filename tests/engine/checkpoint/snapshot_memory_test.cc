// Memory of snapshots that outlives its process: whose it is, and which step ranks restore.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <set>

#include "comm/processes/shared/snapshot_memory_file.h"
#include "engine/checkpoint/checkpoint.h"
#include "engine/checkpoint/snapshot/peer_copies.h"
#include "engine/checkpoint/snapshot/snapshot_area.h"
#include "engine/checkpoint/snapshot/snapshot_memory.h"
#include "engine/checkpoint/snapshot/snapshot_position.h"
#include "tandem/error.h"
#include "tandem/random.h"

namespace tandem {
namespace {

using ::testing::HasSubstr;

/// Newest step of a start that every owner has, by trying all.
std::pair<int64_t, uint64_t> reference_common(const std::vector<FoundGeneration>& all, int ranks) {
  std::pair<int64_t, uint64_t> best{-1, 0};
  for (const FoundGeneration& candidate : all) {
    std::set<int> owners;
    for (const FoundGeneration& g : all) {
      if (g.step == candidate.step && g.start == candidate.start) owners.insert(g.owner);
    }
    if (int(owners.size()) == ranks) best = std::max(best, {candidate.step, candidate.start});
  }
  return best;
}

TEST(SnapshotPosition, IsTheNewestStepThatEveryRankHas) {
  int found = 0, from_peers = 0;
  for (uint64_t i = 0; i < 4000; ++i) {
    uint64_t counter = 0;
    const auto draw = [&](uint32_t below) { return int(philox(3, i, counter++)[0] % below); };
    const int ranks = 1 + draw(4);
    std::vector<FoundGeneration> all;
    for (int holder = 0; holder < ranks; ++holder) {
      for (int index = 0; index < 3; ++index) {
        if (draw(4) == 0) continue;
        all.push_back({holder, holder, index, 5 + draw(3), uint64_t(draw(2))});
      }
      for (int index = 0; index < 2 && ranks > 1; ++index) {
        if (draw(3) == 0) continue;
        all.push_back(
            {holder, (holder + ranks - 1) % ranks, index, 5 + draw(3), uint64_t(draw(2))});
      }
    }
    const auto expected = reference_common(all, ranks);
    const auto position = newest_common(all, ranks);
    ASSERT_EQ(position.has_value(), expected.first >= 0) << i;
    if (!position) continue;
    ++found;
    ASSERT_EQ(std::pair(position->step, position->start), expected) << i;
    ASSERT_EQ(int(position->sources.size()), ranks);
    for (int rank = 0; rank < ranks; ++rank) {
      const FoundGeneration& source = position->sources[size_t(rank)];
      ASSERT_EQ(source.owner, rank);
      ASSERT_EQ(std::pair(source.step, source.start), expected);
      ASSERT_NE(std::ranges::find(all, source), all.end());
      const bool has_local = std::ranges::any_of(all, [&](const FoundGeneration& g) {
        return g.holder == rank && g.owner == rank && std::pair(g.step, g.start) == expected;
      });
      ASSERT_EQ(source.holder == rank, has_local) << i;
      from_peers += !has_local;
    }
  }
  EXPECT_GT(found, 1000);
  EXPECT_GT(from_peers, 100);
}

TEST(PeerDistance, PutsCopiesOnOtherHostsWhereItCan) {
  using Hosts = std::vector<uint64_t>;
  EXPECT_EQ(peer_distance(Hosts{7, 7}), 1);
  EXPECT_EQ(peer_distance(Hosts{7, 8}), 1);
  EXPECT_EQ(peer_distance(Hosts{7, 7, 8, 8}), 2);
  EXPECT_EQ(peer_distance(Hosts{7, 7, 7, 8, 8, 8}), 3);
  EXPECT_EQ(peer_distance(Hosts{7, 8, 7, 8}), 1);
  EXPECT_EQ(peer_distance(Hosts{7, 7, 7, 7}), 1);
  EXPECT_EQ(peer_distance(Hosts{7, 7, 8, 8, 9, 9}), 2);
}

SnapshotShape small_shape() {
  return {3, 100, 5000};
}

TEST(SnapshotArea, TellsWhoseItIs) {
  const int fd = processes::create_snapshot_memory();
  ASSERT_GE(fd, 0);
  const SnapshotOwner owner{"run a", "tp 2 dp 1", 1, 2};
  EXPECT_FALSE(SnapshotArea(fd, 0).has_owner());
  {
    SnapshotArea area(fd, 0);
    area.reset(owner, small_shape());
    EXPECT_EQ(area.oldest({}), 0);
    SnapshotHeader& header = area.header(2);
    header.step = 4;
    header.complete();
  }
  SnapshotArea area(fd, 0);  // of another process
  ASSERT_TRUE(area.has_owner());
  EXPECT_FALSE(SnapshotArea(fd, kAreaRange).has_owner());
  EXPECT_EQ(area.shape(), small_shape());
  EXPECT_EQ(area.differs(owner), "");
  EXPECT_EQ(area.differs({"run b", "tp 2 dp 1", 1, 2}), "they are of run run a: expected run b");
  EXPECT_EQ(area.differs({"run a", "tp 1 dp 2", 1, 2}),
            "they are of tp 2 dp 1 on 2 ranks: expected tp 1 dp 2 on 2");
  EXPECT_EQ(area.differs({"run a", "tp 2 dp 1", 0, 2}), "they are of rank 1: expected 0");
  EXPECT_TRUE(area.header(2).is_valid());
  EXPECT_EQ(area.header(2).step, 4);
  const int in_use[] = {0, 1};
  EXPECT_EQ(area.oldest(in_use), 2);
  const int all[] = {0, 1, 2};
  EXPECT_EQ(area.oldest(all), -1);
  area.reset({"run b", std::string(5000, 'x'), 0, 2}, small_shape());
  EXPECT_EQ(area.differs({"run b", std::string(5000, 'x'), 0, 2}), "");
  EXPECT_FALSE(area.header(2).is_valid());
  ::close(fd);
}

TEST(SnapshotArea, ChangedFirstPageHasNoOwner) {
  const int fd = processes::create_snapshot_memory();
  SnapshotArea area(fd, 0);
  area.reset({"run", "layout", 0, 1}, small_shape());
  for (const off_t at : {off_t{0}, off_t{9}, off_t{80}, off_t{2130}, off_t{2150}}) {
    char byte = 0;
    ASSERT_EQ(::pread(fd, &byte, 1, at), 1);
    const char changed = char(byte ^ 4);
    ASSERT_EQ(::pwrite(fd, &changed, 1, at), 1);
    EXPECT_FALSE(SnapshotArea(fd, 0).has_owner()) << at;
    ASSERT_EQ(::pwrite(fd, &byte, 1, at), 1);
    EXPECT_TRUE(SnapshotArea(fd, 0).has_owner()) << at;
  }
  ::close(fd);
}

/// Makes the generations of an area valid, one for each step of start 1; others are not.
void fill(SnapshotArea& area, const SnapshotOwner& owner, const std::vector<int64_t>& steps) {
  const std::string text = to_text(TrainState{});
  SnapshotShape shape = small_shape();
  shape.generations = 4;
  shape.state_room = text.size();
  area.reset(owner, shape);
  for (size_t index = 0; index < steps.size(); ++index) {
    SnapshotHeader& header = area.header(int(index));
    text.copy(reinterpret_cast<char*>(&header + 1), text.size());
    header.step = steps[index];
    header.start = 1;
    header.state_bytes = text.size();
    header.complete();
  }
}

TEST(SnapshotMemory, NamesTheStepThatOnlyCopiesOfAllRanksHave) {
  struct Case {
    std::vector<int64_t> local[2], copies[2];  ///< steps, by rank
    std::optional<int> copied[2];              ///< expected
  };
  const Case cases[] = {// The next copies were complete on one rank only.
                        {{{3, 4, 5, 6}, {5, 4, 3}}, {{3, 4}, {3}}, {0, 2}},
                        // One rank has lost its memory, and with it the copies of the other.
                        {{{3, 4, 5}, {}}, {{3, 4}, {}}, {std::nullopt, std::nullopt}},
                        // A rank's generation is invalid.
                        {{{3, 4, 5}, {4, 5}}, {{3}, {3, 4}}, {0, -1}},
                        {{{3, 4, 5}, {4, 5}}, {{4, 5}, {5}}, {std::nullopt, std::nullopt}}};
  for (const Case& c : cases) {
    run_threads({.ranks = 2}, [&](Communicator& world) {
      const auto rank = size_t(world.rank());
      SnapshotOwner owner{"run", "tp 1 dp 2", int(rank), 2};
      SnapshotMemory memory(world, owner);
      if (!c.local[rank].empty()) fill(memory.local(), owner, c.local[rank]);
      owner.rank = 1 - owner.rank;
      if (!c.copies[rank].empty()) fill(memory.peer(), owner, c.copies[rank]);
      memory.find(world);
      EXPECT_EQ(memory.copied(), c.copied[rank]);
    });
  }
}

/// Message of the error of opening what the variable says, in a new process.
void expect_refusal(const std::string& value, const std::string& expected) {
  ::setenv(processes::kSnapshotMemoryVariable, value.c_str(), 1);
  EXPECT_EXIT(
      {
        try {
          processes::open_snapshot_memory(0);
        } catch (const InvalidArgument& error) {
          fmt::print(stderr, "{}\n", error.what());
          ::_exit(3);
        }
        ::_exit(0);
      },
      testing::ExitedWithCode(3), expected);
  ::unsetenv(processes::kSnapshotMemoryVariable);
}

TEST(SnapshotMemoryFile, OtherDescriptorsAreRefused) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");  // the environment is read once
  expect_refusal("77",
                 "TANDEM_SNAPSHOT_MEMORY=77: expected the file descriptor that tandem launch");
  expect_refusal("2", "TANDEM_SNAPSHOT_MEMORY=2: expected the file descriptor that tandem launch");
  expect_refusal("two", "TANDEM_SNAPSHOT_MEMORY=two: expected a whole number");
}

TEST(SnapshotMemoryFile, IsNotCreatedWhereFilesAreLimited) {
  const pid_t child = ::fork();
  if (child == 0) {
    const rlimit limit{1 << 20, 1 << 20};
    ::setrlimit(RLIMIT_FSIZE, &limit);
    ::_exit(processes::create_snapshot_memory() == -1 ? 0 : 1);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  EXPECT_EQ(status, 0);
}

}  // namespace
}  // namespace tandem
