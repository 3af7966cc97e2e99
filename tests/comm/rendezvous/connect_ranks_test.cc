// Worlds of ranks without a launcher. Bytes are gathered by thread-ranks here; the nodes that ranks
// name determine whether they connect by a local socket or TCP.
#include "comm/processes/connect_ranks.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "comm/world/new_worlds.h"
#include "tandem/error.h"

namespace tandem::test {
namespace {

using processes::Connected;
using processes::Newcomer;
using testing::AllOf;
using testing::Each;
using testing::HasSubstr;

constexpr int kMaxRanksOfNode = 8;

/// Runs `body` on each rank after it has joined; returns the text of its error, if any, by rank.
std::vector<std::string> connect_all(int size, const std::function<Newcomer(int rank)>& newcomer,
                                     const std::function<void(const Connected&)>& body,
                                     double deadline_s = 10,
                                     int max_ranks_of_node = kMaxRanksOfNode) {
  const Communicators before = new_thread_ranks({.ranks = size, .deadline_s = deadline_s});
  std::vector<std::string> errors{size_t(size)};
  std::vector<std::jthread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      const auto gather = [&](std::span<const std::byte> local) {
        std::vector<std::byte> all;
        for (const auto& each : before[size_t(rank)]->exchange(local, "gather")) {
          all.insert(all.end(), each.begin(), each.end());
        }
        return all;
      };
      Newcomer local = newcomer(rank);
      local.rank = rank;
      local.size = size;
      try {
        body(processes::connect_ranks("adopt", local, gather, max_ranks_of_node, deadline_s));
      } catch (const Timeout& error) {
        errors[size_t(rank)] = std::string("Timeout: ") + error.what();
      } catch (const Aborted& error) {
        errors[size_t(rank)] = std::string("Aborted: ") + error.what();
      } catch (const InvalidArgument& error) {
        errors[size_t(rank)] = std::string("InvalidArgument: ") + error.what();
      } catch (const Unsupported& error) {
        errors[size_t(rank)] = std::string("Unsupported: ") + error.what();
      }
    });
  }
  threads.clear();
  return errors;
}

class Meeting : public testing::TestWithParam<int> {  // number of nodes that the ranks name
 protected:
  static Newcomer on_node(int rank) {
    Newcomer local;
    local.node = "node " + std::to_string(rank % GetParam());
    return local;
  }
};

TEST_P(Meeting, ConnectsAControlPlaneAndItsGroups) {
  for (const int size : {1, 2, 3, 5}) {
    std::vector<std::string> names{size_t(size)};
    const auto errors = connect_all(size, on_node, [&](const Connected& met) {
      Communicator& control = *met.comm;
      EXPECT_EQ(control.size(), size);
      names[size_t(control.rank())] = met.world;
      for (int round = 0; round < 10; ++round) control.require_same("name", met.world);
      // Each rank, rank 0 included, is the first of a group once.
      for (int first = 0; first < size; ++first) {
        const auto group = control.split(0, (control.rank() - first + size) % size);
        EXPECT_EQ(group->rank(), (control.rank() - first + size) % size);
        group->barrier("in a group");
      }
      control.barrier("end");
    });
    EXPECT_THAT(errors, Each(std::string()));
    EXPECT_THAT(names, Each(AllOf(names[0], testing::SizeIs(64))));
  }
}

TEST_P(Meeting, AbortReachesAllRanks) {
  const auto errors = connect_all(3, on_node, [](const Connected& met) {
    if (met.comm->rank() == 2) return met.comm->abort("on purpose");
    met.comm->barrier("never");
  });
  EXPECT_EQ(errors, (std::vector<std::string>{"Aborted: aborted by rank 2: on purpose",
                                              "Aborted: aborted by rank 2: on purpose", ""}));
}

INSTANTIATE_TEST_SUITE_P(Nodes, Meeting, testing::Values(1, 2),
                         [](const auto& nodes) { return nodes.param == 1 ? "local" : "tcp"; });

TEST(ConnectRanks, RefusalIsThrownByAllAndNamesItsRank) {
  const auto refuses = [](int rank) {
    Newcomer local;
    if (rank == 1) local.refusal = "the current device is cuda:0: expected cuda:1";
    return local;
  };
  const auto errors =
      connect_all(3, refuses, [](const Connected&) { ADD_FAILURE() << "they met"; });
  const std::string text = "the current device is cuda:0: expected cuda:1";
  EXPECT_EQ(errors[0], "InvalidArgument: adopt: rank 1: " + text);
  EXPECT_EQ(errors[1], "InvalidArgument: adopt: " + text);
  EXPECT_EQ(errors[2], errors[0]);
}

TEST(ConnectRanks, DifferentProgramsAreRefusedUnlessAllRanksAllowThem) {
  for (const bool all_allow : {false, true}) {
    const auto of_two_programs = [&](int rank) {
      Newcomer local;
      local.build = {};
      local.build.text[0] = rank == 1 ? 'b' : 'a';
      local.build.allowed = rank < 2 || all_allow ? 1 : 0;
      return local;
    };
    int met = 0;
    const auto errors = connect_all(3, of_two_programs, [&](const Connected& m) {
      if (m.comm->rank() == 0) ++met;
      m.comm->barrier("all are connected");  // to a store that rank 0 ends
    });
    EXPECT_EQ(met, all_allow ? 1 : 0);
    const std::string refusal = "InvalidArgument: rank 0 runs a; rank 1 runs b: expected the same";
    for (const std::string& error : errors) {
      EXPECT_EQ(error.substr(0, refusal.size()), all_allow ? "" : refusal);
    }
  }
}

TEST(ConnectRanks, TooManyRanksOfANodeAreRefusedByAll) {
  const auto of_two = [](int rank) {
    Newcomer local;
    local.node = rank < 2 ? "small" : "large";
    return local;
  };
  const auto errors = connect_all(
      5, of_two, [](const Connected&) { ADD_FAILURE() << "they met"; }, 10, 2);
  EXPECT_THAT(errors, Each("Unsupported: adopt: 3 ranks of one node: expected at most 2"));
}

TEST(ConnectRanks, WorldsHaveUniqueNames) {
  std::vector<std::string> names;
  for (int again = 0; again < 2; ++again) {
    connect_all(
        1, [](int) { return Newcomer{}; },
        [&](const Connected& met) { names.push_back(met.world); });
  }
  ASSERT_EQ(names.size(), 2u);
  EXPECT_NE(names[0], names[1]);
}

}  // namespace
}  // namespace tandem::test
