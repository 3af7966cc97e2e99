// Groups by name and members, on every transport of CPU ranks.
#include "comm/group.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <thread>
#include <vector>

#include "tandem/collectives.h"
#include "tests/comm/ranks.h"

namespace tandem::test {
namespace {

class GroupTest : public OnRanks {};
TANDEM_INSTANTIATE(GroupTest);

std::vector<int> ranks_in(Communicator& comm, int local) {
  std::vector<int> all;
  for (const auto& blob : comm.exchange(std::as_bytes(std::span(&local, 1)), "ranks")) {
    int remote = -1;
    std::memcpy(&remote, blob.data(), std::min(blob.size(), sizeof remote));
    all.push_back(remote);
  }
  return all;
}

TEST_P(GroupTest, GroupsHaveTheirMembersInOrder) {
  run([](Communicator& comm) {
    const int last = comm.size() - 1, rank = comm.rank();
    std::vector<int> reversed, pair{last, 0};
    for (int r = last; r >= 0; --r) reversed.push_back(r);
    const auto all = make_group(comm, "all", reversed);
    EXPECT_EQ(all->rank(), last - rank);
    EXPECT_EQ(ranks_in(*all, rank), reversed);
    const auto again = make_group(comm, "all", reversed);  // the same name is another group
    EXPECT_EQ(ranks_in(*again, rank), reversed);
    EXPECT_EQ(ranks_in(*all, rank), reversed);
    if (comm.size() < 3 || (rank != 0 && rank != last)) return;
    EXPECT_EQ(ranks_in(*make_group(comm, "pair", pair), rank), pair);  // without the others
    EXPECT_THROW(make_group(comm, "others", {last - rank}), InvalidArgument);
    EXPECT_THROW(make_group(comm, "beyond", {rank, comm.size()}), InvalidArgument);
  });
}

TEST_P(GroupTest, MessagesWaitForAGroupThatIsMadeLater) {
  run([](Communicator& comm) {
    if (comm.size() < 2 || comm.rank() > 1) return;
    for (int round = 0; round < 3; ++round) {
      if (comm.rank() == 1) std::this_thread::sleep_for(std::chrono::milliseconds(50));
      const auto group = make_group(comm, "late", {0, 1});
      std::vector<float> data(100000, float(comm.rank()));
      const Tensor tensor = Tensor::of(data.data(), {int64_t(data.size())});
      const int value = round + 1;
      if (comm.rank() == 0) {
        std::fill(data.begin(), data.end(), float(value));
        send(*group, tensor, 1);
      } else {
        recv(*group, tensor, 0);
        EXPECT_EQ(data, std::vector<float>(data.size(), float(value)));
      }
    }
  });
}

}  // namespace
}  // namespace tandem::test
