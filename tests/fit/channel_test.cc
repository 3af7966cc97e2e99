#include <gtest/gtest.h>

#include <atomic>
#include <cstring>
#include <numeric>

#include "fit/exchange/star.h"
#include "tandem/error.h"
#include "tandem/random.h"
#include "tests/error_of.h"

namespace tandem::fit {
namespace {

/// Generated plans among clients and the server, of sizes that grow, shrink and are 0.
std::vector<Message> make_plan(int clients, int exchange) {
  std::vector<Message> plan;
  const uint32_t count = philox(1, 2, uint64_t(exchange))[0] % 40;
  for (uint32_t i = 0; i < count; ++i) {
    const auto words = philox(3, uint64_t(exchange), i);
    const auto node = [&](uint32_t word) { return int(word % uint32_t(clients + 1)) - 1; };
    plan.push_back({node(words[0]), node(words[1]), words[2] % (words[3] % 7 ? 50 : 5000)});
  }
  return plan;
}

std::byte expected_byte(int exchange, size_t message, size_t at) {
  return std::byte(philox(uint64_t(exchange), message, at)[0]);
}

TEST(ChannelTest, DeliversGeneratedPlansAndCountsTheirBytes) {
  for (const int ranks : {1, 2, 3, 4}) {
    constexpr int kClients = 9, kExchanges = 30;
    std::atomic<int64_t> bytes_sent = 0, bytes_read = 0;
    run_threads({.ranks = ranks}, [&](Communicator& comm) {
      Channel channel(comm, kClients);
      for (int e = 0; e < kExchanges; ++e) {
        const auto plan = make_plan(kClients, e);
        size_t last = 0;
        channel.exchange(
            plan,
            [&](size_t i, std::span<std::byte> to) {
              ASSERT_EQ(to.size(), plan[i].bytes);
              for (size_t k = 0; k < to.size(); ++k) to[k] = expected_byte(e, i, k);
            },
            [&](size_t i, std::span<const std::byte> from) {
              EXPECT_GE(i, last);
              last = i;
              ASSERT_EQ(from.size(), plan[i].bytes);
              EXPECT_EQ(reinterpret_cast<uintptr_t>(from.data()) % sizeof(double), 0u);
              for (size_t k = 0; k < from.size(); ++k)
                ASSERT_EQ(from[k], expected_byte(e, i, k)) << "exchange " << e << " message " << i;
              bytes_read += int64_t(from.size());
            });
      }
      bytes_sent += channel.bytes_sent();
    });
    int64_t expected = 0;
    for (int e = 0; e < kExchanges; ++e)
      for (const Message& message : make_plan(kClients, e)) expected += int64_t(message.bytes);
    EXPECT_EQ(bytes_sent, expected) << ranks;
    EXPECT_EQ(bytes_read, expected) << ranks;
  }
}

TEST(ChannelTest, ServerReadsInTheOrderOfClients) {
  std::vector<int> order;
  run_threads({.ranks = 3}, [&](Communicator& comm) {
    Channel channel(comm, 5);
    const std::vector<int> clients{4, 0, 3};
    send_up(
        channel, clients, [](int client) { return size_t(client + 1); },
        [](int client, std::span<double> to) {
          for (double& value : to) value = client;
        },
        [&](int client, std::span<const double> from) {
          EXPECT_EQ(from.size(), size_t(client + 1));
          for (const double value : from) EXPECT_EQ(value, client);
          order.push_back(client);
        });
  });
  EXPECT_EQ(order, (std::vector<int>{4, 0, 3}));
}

// The message is so large that its memory, once freed, is unmapped under a link that still reads
// it.
TEST(ChannelTest, ErrorWaitsForMessagesUnderWay) {
  constexpr size_t kBytes = 8 << 20;
  const std::vector<Message> plan{{0, 1, kBytes}, {0, 1, 8}};
  const auto write = [](size_t i, std::span<std::byte>) {
    if (i == 1) throw Error("no second message");
  };
  const auto read = [](size_t, std::span<const std::byte>) {};
  EXPECT_EQ(error_of([&] {
              run_threads({.ranks = 2, .link = EmulatedLink{1e9, 0}}, [&](Communicator& comm) {
                Channel(comm, 2).exchange(plan, write, read);
              });
            }),
            "no second message");
}

TEST(ChannelTest, RankThatDoesNotComeIsReported) {
  try {
    run_threads({.ranks = 2, .deadline_s = 0.2}, [](Communicator& comm) {
      Channel channel(comm, 2);
      const std::vector<Message> plan{{0, 1, 8}};
      const auto write = [](size_t, std::span<std::byte>) {};
      const auto read = [](size_t, std::span<const std::byte>) {};
      channel.exchange(plan, write, read);
      if (comm.rank() == 0) channel.exchange(plan, write, read);
    });
    FAIL() << "no error";
  } catch (const Timeout& error) {
    EXPECT_EQ(error.rank, 0);
    EXPECT_EQ(error.peer, 1);
    EXPECT_EQ(error.op, "fit exchange");
    EXPECT_EQ(std::string(error.what()).find("tile"), std::string::npos);
  }
}

}  // namespace
}  // namespace tandem::fit
