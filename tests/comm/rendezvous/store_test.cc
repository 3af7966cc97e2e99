// Clients of a rendezvous store over its sockets: requests, lost clients, and ten thousand hostile
// connections next to clients that work.
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>

#include <array>
#include <atomic>
#include <optional>
#include <thread>

#include "comm/rendezvous/connect.h"
#include "comm/rendezvous/endpoint.h"
#include "comm/rendezvous/secret.h"
#include "comm/rendezvous/store_client.h"
#include "comm/rendezvous/store_server.h"
#include "core/system/process/file_limit.h"
#include "tandem/error.h"

namespace tandem::test {
namespace {

using namespace control;

const Secret kStoreSecret = read_secret("of these tests, 16 bytes and more", "");

/// A store on a free TCP port.
struct World {
  explicit World(int size) {
    launch.size = size;
    launch.host = "127.0.0.1";
    launch.world = "store test";
    Connection listener = listen_on({"", "", 0});
    launch.port = port_of(listener);
    server.emplace(std::move(listener), credentials(), size);
  }
  Credentials credentials() const { return credentials_of(kStoreSecret, launch.world); }
  std::unique_ptr<StoreClient> client(int rank) const {
    Launch of_rank = launch;
    of_rank.rank = rank;
    return std::make_unique<StoreClient>(rank, join(of_rank, credentials(), 20));
  }
  Launch launch;
  std::optional<StoreServer> server;
};

void ignore(const Event&) {}

bool soon(StoreClient& client, const StoreClient::Pending& pending) {
  return client.await(pending, after(20), ignore);
}

TEST(StoreServer, ServesSeveralClients) {
  World world(2);
  const auto zero = world.client(0), one = world.client(1);
  const std::string key = "address/0";
  const auto waiting = one->get(std::span(&key, 1), true);
  zero->set(key, bytes_of("here"));
  ASSERT_TRUE(soon(*one, waiting));
  EXPECT_EQ(text_of(StoreClient::values(*waiting).at(0)), "here");
  const auto first = zero->add("n", 2);
  ASSERT_TRUE(soon(*zero, first));
  const auto second = one->add("n", 3);
  ASSERT_TRUE(soon(*one, second));
  EXPECT_EQ(StoreClient::number(*second), 5);
}

TEST(StoreServer, AWaitEndsAtItsDeadline) {
  World world(2);
  const auto zero = world.client(0);
  const auto waiting = zero->meet({.name = "m", .count = 2, .index = 0});
  EXPECT_FALSE(zero->await(waiting, after(0.05), ignore));
  const auto missing = zero->ask_missing("m");
  ASSERT_TRUE(soon(*zero, missing));
  EXPECT_EQ(StoreClient::missing(*missing), std::vector<int>{1});
}

// Both a client that closes its connection and one that sends nonsense.
TEST(StoreServer, LostClientsAreReported) {
  World world(3);
  auto zero = world.client(0), one = world.client(1);
  Launch of_two = world.launch;
  of_two.rank = 2;
  Channel two(join(of_two, world.credentials(), 20));
  zero->watch("member/", true);
  ASSERT_TRUE(soon(*zero, zero->add("n", 1)));  // now it watches
  one->set("member/1", {}, 60);
  two.queue(Channel::serialize({Kind::set, 60, 0, 8, 0}, "member/2", {}));
  ASSERT_TRUE(two.drain());
  std::vector<std::string> lost;
  int set = 0;
  const auto receive_until = [&](const auto& done) {
    for (const auto until = after(20); !done() && Clock::now() < until;) {
      wait_until(zero->fd(), POLLIN, after(0.05));
      zero->receive([&](const Event& event) {
        if (event.change == Change::set) ++set;
        if (event.change == Change::lost) lost.push_back(event.key);
      });
    }
  };
  receive_until([&] { return set == 2; });
  one.reset();
  receive_until([&] { return lost.size() == 1; });
  two.queue(Channel::serialize({Kind::met, 0, 0, 0, 0}, {}, {}));
  two.drain();
  receive_until([&] { return lost.size() == 2; });
  EXPECT_EQ(lost, (std::vector<std::string>{"member/1", "member/2"}));
}

// A message may take far longer than the store may be silent, as long as it is read.
TEST(StoreClient, SendsAsLongAsTheStoreReads) {
  std::array<int, 2> ends{};
  ASSERT_EQ(socketpair(AF_UNIX, SOCK_STREAM, 0, ends.data()), 0);
  constexpr double kStall = 2;
  constexpr size_t kBytes = size_t(6) << 20, kReads = 30;
  auto client = std::make_unique<StoreClient>(0, Connection(ends[0]), kStall);
  const Connection store(ends[1]);
  size_t received = 0;
  std::jthread reader([&] {
    std::vector<std::byte> slice(kBytes / kReads);
    for (ssize_t got = 1; got > 0; received += size_t(std::max<ssize_t>(got, 0))) {
      std::this_thread::sleep_for(std::chrono::duration<double>(2 * kStall / kReads));
      got = recv(store.fd(), slice.data(), slice.size(), MSG_WAITALL);
    }
  });
  client->set("key", Blob(kBytes));
  client.reset();
  reader.join();
  EXPECT_EQ(received, sizeof(Header) + 3 + kBytes);
}

TEST(StoreServer, AClientOfAnEndedStoreIsTold) {
  World world(1);
  const auto zero = world.client(0);
  std::thread end([&] { world.server.reset(); });
  const std::string key = "never";
  EXPECT_THROW(zero->await(zero->get(std::span(&key, 1), true), after(20), ignore), Aborted);
  end.join();
}

// Silent ones, garbage, half answers, wrong proofs and announced gigabytes.
void attack(const World& world, int strangers, std::atomic<int>& connected) {
  std::vector<Connection> open;
  for (int i = 0; i < strangers; ++i) {
    std::string why;
    Connection connection = connect_to({"", world.launch.host, world.launch.port}, 5, why);
    if (!connection.open()) continue;
    ++connected;
    Answer answer{kMagic, i % 4, 4, 1, random_digest(), {}};
    answer.proof = random_digest();
    const Header header{Kind::meet, 0, 0, ~0u, ~0u};
    const std::span<const std::byte> messages[] = {
        {},
        bytes_of("GET / HTTP/1.1\r\n\r\n"),
        std::as_bytes(std::span(&answer, 1)),
        std::as_bytes(std::span(&answer, 1)).first(sizeof answer / 2),
        std::as_bytes(std::span(&header, 1))};
    const auto message = messages[i % 5];
    send(connection.fd(), message.data(), message.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
    open.push_back(std::move(connection));
    if (open.size() > 4000) open.erase(open.begin(), open.begin() + 2000);
  }
}

TEST(StoreServer, TenThousandHostileConnectionsDisturbNoClient) {
  constexpr int kClients = 4, kStrangers = 10000;
  raise_file_limit();
  World world(kClients + 1);  // until the last one comes, the port is open
  std::atomic<int> connected = 0, ended = 0;
  std::thread attacker([&] { attack(world, kStrangers, connected); });
  std::vector<std::thread> clients;
  for (int rank = 0; rank < kClients; ++rank) {
    clients.emplace_back([&, rank] {
      const auto client = world.client(rank);
      for (int step = 0;; ++step) {
        const std::string name = fmt::format("step/{}", step);
        const uint8_t more = connected < kStrangers;
        const auto met = client->meet({.name = name,
                                       .count = kClients,
                                       .index = rank,
                                       .blob = std::as_bytes(std::span(&more, 1))});
        if (!client->await(met, after(30), ignore)) return;
        bool any = step < 9;
        for (const Blob& blob : StoreClient::met(*met).blobs) any |= blob.at(0) != std::byte{};
        if (!any) break;
      }
      ++ended;
    });
  }
  attacker.join();
  for (auto& client : clients) client.join();
  EXPECT_EQ(connected, kStrangers);
  EXPECT_EQ(ended, kClients);
  const auto last = world.client(kClients);
  ASSERT_TRUE(soon(*last, last->add("n", 1)));
  const Connection closed = [&] {
    std::string why;
    return connect_to({"", world.launch.host, world.launch.port}, 5, why);
  }();
  EXPECT_FALSE(closed.open());
}

}  // namespace
}  // namespace tandem::test
