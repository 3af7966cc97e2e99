// Shared ownership of a world's ranks beyond a callback. A WorldState represents a process here.
#include "comm/world/world_state.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "comm/threads/make_ranks.h"
#include "tandem/error.h"

namespace tandem::test {
namespace {

using testing::ElementsAre;
using testing::IsEmpty;

using SharedState = std::shared_ptr<WorldState>;

Communicators controls_of(int ranks, double deadline_s = 20) {
  return new_thread_ranks({.ranks = ranks, .deadline_s = deadline_s});
}

/// Names of the resources that have ended, and whether all ranks did so together.
struct Ended {
  std::vector<std::string> names;
  WorldState::End as(const std::string& name) {
    return [this, name](bool together) { names.push_back(name + (together ? "" : " alone")); };
  }
};

TEST(WorldState, RanksOfOneProcessEndAtOnce) {
  WorldState world(controls_of(3));
  Ended ended;
  world.end_with_all(ended.as("first"));
  EXPECT_THAT(ended.names, ElementsAre("first"));
}

TEST(WorldState, ProcessesEndTogetherWithTheirLastHandles) {
  const Communicators controls = controls_of(2);
  Ended ended[2];
  std::vector<std::jthread> processes;
  for (size_t rank = 0; rank < 2; ++rank) {
    processes.emplace_back([&, rank] {
      SharedState world = std::make_shared<WorldState>(Communicators{controls[rank]});
      SharedState group = world, other = world;
      group->end_with_all(ended[rank].as(rank ? "a" : "b"));
      group.reset();
      if (rank) std::this_thread::sleep_for(std::chrono::milliseconds(100));
      world->end_with_all(ended[rank].as(rank ? "b" : "a"));
      world.reset();
      EXPECT_THAT(ended[rank].names, IsEmpty());
      other.reset();
    });
  }
  processes.clear();
  EXPECT_THAT(ended[0].names, ElementsAre("b", "a"));
  EXPECT_THAT(ended[1].names, ElementsAre("a", "b"));
}

TEST(WorldState, MissingProcessIsNotAwaitedBeyondTheDeadline) {
  const Communicators controls = controls_of(2, 0.2);
  Ended ended;
  SharedState world = std::make_shared<WorldState>(Communicators{controls[0]});
  world->end_with_all(ended.as("first"));
  world->end_with_all(ended.as("second"));
  world.reset();
  EXPECT_THAT(ended.names, ElementsAre("first alone", "second alone"));
}

TEST(WorldState, FailedWorldWaitsForNoRank) {
  const Communicators controls = controls_of(2, 60);
  Ended ended;
  SharedState world = std::make_shared<WorldState>(Communicators{controls[0]});
  world->end_with_all(ended.as("first"));
  controls[1]->abort("enough");
  const auto begin = std::chrono::steady_clock::now();
  world.reset();
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(20));
  EXPECT_THAT(ended.names, ElementsAre("first alone"));
}

TEST(WorldState, WorldWithoutResourcesWaitsForNoRank) {
  const Communicators controls = controls_of(2, 60);
  const auto begin = std::chrono::steady_clock::now();
  { const WorldState world(Communicators{controls[0]}); }
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(20));
}

// Three ranks, two of them in one process.
TEST(WorldState, RanksOfAProcessShareOneWorld) {
  const Communicators controls = controls_of(3);
  SharedState first = WorldState::join("shared", controls[0]);
  SharedState second = WorldState::join("shared", controls[1]);
  EXPECT_EQ(first, second);
  EXPECT_NE(WorldState::join("another", controls[0]), first);
  Ended ended, elsewhere;
  first->end_with_all(ended.as("first"));
  second->end_with_all(ended.as("second"));
  first.reset();
  EXPECT_THAT(ended.names, IsEmpty());
  {
    std::jthread last([&] { second.reset(); });
    SharedState other = std::make_shared<WorldState>(Communicators{controls[2]});
    other->end_with_all(elsewhere.as("third"));
  }
  EXPECT_THAT(ended.names, ElementsAre("first", "second"));
  EXPECT_THAT(elsewhere.names, ElementsAre("third"));
  EXPECT_EQ(WorldState::join("shared", controls[0]).use_count(), 1) << "the one before has ended";
}

TEST(MakeRanks, ReturnsCommunicatorsInRankOrder) {
  const Communicators controls = controls_of(4);
  const Communicators made = threads::make_ranks(controls, [&](int rank) {
    controls[size_t(rank)]->barrier();
    return controls[size_t(rank)];
  });
  EXPECT_EQ(made, controls);
}

TEST(MakeRanks, FirstErrorEndsTheOtherWaitsAndIsThrown) {
  const Communicators controls = controls_of(4, 60);
  const auto make = [&](int rank) {
    if (rank == 2) throw InvalidArgument("rank 2: expected a GPU");
    controls[size_t(rank)]->barrier();
    return controls[size_t(rank)];
  };
  try {
    threads::make_ranks(controls, make);
    ADD_FAILURE() << "no error";
  } catch (const InvalidArgument& error) {
    EXPECT_STREQ(error.what(), "rank 2: expected a GPU");
  }
}

}  // namespace
}  // namespace tandem::test
