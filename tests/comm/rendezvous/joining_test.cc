// Ranks that join a rendezvous store: those admitted, the refusals of others, and a rank's report
// of any other listener at the store's address. Ranks are threads here.
#include "comm/rendezvous/connect.h"

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <netdb.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <functional>
#include <future>
#include <thread>

#include "comm/processes/rank.h"
#include "comm/processes/rendezvous_bootstrap.h"
#include "comm/rendezvous/admission.h"
#include "comm/rendezvous/endpoint.h"
#include "comm/rendezvous/store_server.h"

namespace tandem::test {
namespace {

using namespace control;

const Secret kSecret = read_secret("what only the ranks know", "");
const Secret kOther = read_secret("what only others know", "");

Launch at(const std::string& host, int port, int rank, int size) {
  Launch launch;
  launch.host = host;
  launch.port = port;
  launch.rank = rank;
  launch.size = size;
  return launch;
}

/// World of the launch, of which this is a rank.
std::shared_ptr<Communicator> form(const Launch& launch, const Secret& secret, double deadline_s) {
  return processes::new_member(
      std::make_unique<processes::RendezvousBootstrap>(launch, secret, deadline_s),
      {.deadline_s = deadline_s});
}

int free_port() {
  return port_of(listen_on({"", "", 0}));
}

// Error of a rank that is refused by a server of two ranks with secret `hubs`, followed by the
// server's standard error. The valid rank joins last and is not affected.
std::string refusal(const Secret& hubs, Launch stranger, const Secret& secret) {
  testing::internal::CaptureStderr();
  const int port = hubs.source.empty() ? 0 : free_port();
  Launch server = at("127.0.0.1", port, 0, 2);
  server.one_host = hubs.source.empty();
  server.world = stranger.world = "joining " + std::to_string(getpid());
  stranger.host = server.host;
  stranger.port = server.port;
  stranger.one_host = server.one_host;
  const auto run = [](const Launch& launch, const Secret& local) {
    const auto comm = form(launch, local, 20);
    comm->barrier("start");
  };
  auto zero = std::async(std::launch::async, run, server, hubs);
  std::string said = "let in";
  try {
    join(stranger, credentials_of(secret, stranger.world), 20);
  } catch (const Error& error) {
    said = error.what();
  }
  Launch right = server;
  right.rank = 1;
  run(right, hubs);
  zero.get();
  return said + "\n" + testing::internal::GetCapturedStderr();
}

void expect_contains(const std::string& said, std::initializer_list<const char*> fragments) {
  for (const char* fragment : fragments)
    EXPECT_NE(said.find(fragment), said.npos) << fragment << "\n" << said;
  for (const char* secret : {"only the ranks", "only others"}) {
    EXPECT_EQ(said.find(secret), said.npos) << said;
  }
}

TEST(Joining, WrongSecretIsReportedOnBothSides) {
  expect_contains(refusal(kSecret, at("", 0, 1, 2), kOther),
                  {"rank 1: rank 0 at 127.0.0.1:", "the secret of TANDEM_SECRET is not its own",
                   "refused a connection from 127.0.0.1 as rank 1: its secret is not that of "
                   "TANDEM_SECRET"});
}

TEST(Joining, MissingSecretIsReportedOnBothSides) {
  expect_contains(refusal(kSecret, at("", 0, 1, 2), {}),
                  {"it has a secret, this rank has no TANDEM_SECRET or TANDEM_SECRET_FILE",
                   "it has no secret, this rank has TANDEM_SECRET: expected the same"});
  expect_contains(refusal({}, at("", 0, 1, 2), kSecret),
                  {"it has no secret, this rank has TANDEM_SECRET: expected the same",
                   "this rank has neither TANDEM_SECRET nor TANDEM_SECRET_FILE"});
}

TEST(Joining, DifferentWorldSizeIsNamed) {
  expect_contains(refusal(kSecret, at("", 0, 1, 3), kSecret),
                  {"world size: rank 0 has 2, rank 1 has 3: expected the same on all ranks"});
  expect_contains(refusal(kSecret, at("", 0, -1, 2), kSecret), {"world size"});
}

TEST(Joining, DuplicateRankIsRefused) {
  Connection listener = listen_on({"", "", 0});
  const Launch zero = at("127.0.0.1", port_of(listener), 0, 2);
  const Credentials credentials = credentials_of(kSecret, zero.world);
  const StoreServer store(std::move(listener), credentials, 2);
  const Connection first = join(zero, credentials, 20);
  try {
    join(zero, credentials, 20);
    ADD_FAILURE() << "let in";
  } catch (const InvalidArgument& error) {
    expect_contains(error.what(), {"has one already: expected each rank once"});
  }
}

TEST(Joining, SeveralHostsWithoutASecretAreRefusedAtOnce) {
  for (const int rank : {0, 1}) {
    try {
      const auto comm = form(at("node7", 29500, rank, 2), {}, 20);
      ADD_FAILURE() << "let in";
    } catch (const InvalidArgument& error) {
      expect_contains(error.what(), {"no secret", "TANDEM_SECRET or TANDEM_SECRET_FILE", "node7"});
    }
  }
}

// Rank 1 has come in time, but may wait for longer than rank 0, whose store ends.
TEST(Joining, WaitingRankLearnsWhyRankZeroTimedOut) {
  const int port = free_port();
  const auto error_of = [&](int rank, double deadline_s) {
    try {
      form(at("127.0.0.1", port, rank, 3), kSecret, deadline_s);
    } catch (const Error& error) {
      return std::string(error.what());
    }
    return std::string("let in");
  };
  auto one = std::async(std::launch::async, error_of, 1, 60);
  const std::string zero = error_of(0, 0.5);
  EXPECT_EQ(zero.find("first meeting: rank 0 waited 0.5 s for rank"), 0u) << zero;
  EXPECT_EQ(one.get(), "aborted by rank 0: " + zero);
}

TEST(Joining, PortOfAnEndingProcessIsAwaited) {
  Connection taken = listen_on({"", "", 0});
  const int port = port_of(taken);
  std::thread holder([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(300));
    taken.close();
  });
  EXPECT_EQ(port_of(listen_on({"", "", port}, 60)), port);
  holder.join();
}

TEST(Joining, PortInUseIsNamed) {
  const Connection taken = listen_on({"", "", 0});
  const int port = port_of(taken);
  try {
    Launch launch = at("127.0.0.1", port, 0, 2);
    launch.port_from = "MASTER_PORT=29500 + 1";
    const auto comm = form(launch, kSecret, 20);
    ADD_FAILURE() << "listens";
  } catch (const InvalidArgument& error) {
    EXPECT_EQ(error.what(), fmt::format("127.0.0.1:{}: rank 0 cannot listen: Address already in "
                                        "use: expected a free port (MASTER_PORT=29500 + 1 gave it)",
                                        port));
  }
}

// Error of a rank that joins at a listener which does `body` with every connection.
std::string said_of(const std::function<void(const Connection&)>& body, double deadline_s) {
  const Connection listener = listen_on({"", "", 0});
  std::atomic<bool> ended = false;
  std::thread other([&] {
    std::vector<Connection> connections;
    while (!ended) {
      if (!wait_until(listener.fd(), POLLIN, after(0.05))) continue;
      connections.emplace_back(accept4(listener.fd(), nullptr, nullptr, SOCK_CLOEXEC));
      body(connections.back());
    }
  });
  std::string said = "let in";
  const auto begin = Clock::now();
  try {
    const auto comm = form(at("127.0.0.1", port_of(listener), 1, 2), kSecret, deadline_s);
  } catch (const Timeout& error) {
    said = "Timeout: " + std::string(error.what());
    EXPECT_EQ(error.peer, 0);
  } catch (const Error& error) {
    said = error.what();
  }
  EXPECT_LT(Clock::now() - begin, std::chrono::seconds(60));
  ended = true;
  other.join();
  return said;
}

TEST(Joining, OtherListenersAtRankZerosAddressAreRejected) {
  const auto say = [](const Connection& to, const void* bytes, size_t count) {
    EXPECT_EQ(send(to.fd(), bytes, count, MSG_NOSIGNAL), ssize_t(count));
  };
  expect_contains(said_of([](const Connection&) {}, 0.5), {"Timeout", "says nothing", "rank 0"});
  expect_contains(said_of([](const Connection& c) { shutdown(c.fd(), SHUT_RDWR); }, 0.5),
                  {"Timeout", "closes the connection"});
  expect_contains(said_of([&](const Connection& c) { say(c, "SSH-2.0-OpenSSH\r\n", 17); }, 0.5),
                  {"Timeout", "is no rank 0 of this version"});
  const auto half = [&](const Connection& c) { say(c, kMagic.data(), 8); };
  expect_contains(said_of(half, 0.5), {"Timeout", "says nothing"});
  const auto impostor = [&](const Connection& c) {
    const Challenge challenge{kMagic, 1, random_digest()};
    say(c, &challenge, sizeof challenge);
    const Decision decision{kMagic, Verdict::admitted, 2, random_digest()};
    say(c, &decision, sizeof decision);
  };
  expect_contains(said_of(impostor, 20), {"does not know the secret of TANDEM_SECRET"});
}

TEST(Joining, RanksThatDieInTheHandshakeMayJoinAgain) {
  const int port = free_port();
  auto zero = std::async(std::launch::async, [&] {
    const auto comm = form(at("127.0.0.1", port, 0, 2), kSecret, 20);
    comm->barrier("start");
  });
  for (int i = 0; i < 20; ++i) {  // before the challenge, or between it and the decision
    std::string why;
    Connection connection = connect_to({"", "127.0.0.1", port}, 20, why);
    while (!connection.open()) connection = connect_to({"", "127.0.0.1", port}, 20, why);
    if (i % 2 == 0) continue;
    ASSERT_TRUE(wait_until(connection.fd(), POLLIN, after(20)));
    const std::byte fragment{'t'};
    send(connection.fd(), &fragment, 1, MSG_NOSIGNAL);
  }
  {
    const auto comm = form(at("127.0.0.1", port, 1, 2), kSecret, 20);
    comm->barrier("start");
  }
  zero.get();
}

bool resolves(const std::string& host) {
  addrinfo* found = nullptr;
  if (getaddrinfo(host.c_str(), nullptr, nullptr, &found) != 0) return false;
  freeaddrinfo(found);
  return true;
}

// A listener accepts IPv6 and IPv4.
TEST(Joining, Ipv6Ipv4AndNamesWork) {
  const int one = socket(AF_INET6, SOCK_STREAM, 0);
  if (one < 0) GTEST_SKIP() << "this machine has no IPv6";
  close(one);
  for (const std::string host : {"::1", "127.0.0.1", "localhost", "ip6-localhost"}) {
    if (!resolves(host)) continue;
    const int port = free_port();
    std::vector<std::future<void>> ranks;
    for (int rank = 0; rank < 3; ++rank) {
      ranks.push_back(std::async(std::launch::async, [&, rank] {
        const auto comm = form(at(rank == 2 ? "127.0.0.1" : host, port, rank, 3), kSecret, 20);
        comm->barrier("start");
        const auto group = comm->split(rank == 0 ? 0 : 1, 0);
        group->barrier("group");
        comm->barrier("end");
      }));
    }
    for (auto& rank : ranks) EXPECT_NO_THROW(rank.get()) << host;
  }
}

TEST(Joining, OtherUsersOfThisHostAreRejected) {
  if (geteuid() != 0) GTEST_SKIP() << "only root can be two users";
  const Endpoint endpoint{"tandem-joining-test-" + std::to_string(getpid()), "", 0};
  const Connection listener = listen_on(endpoint);
  const auto as_nobody = [&](const std::function<bool()>& body) {
    const pid_t child = fork();
    if (child == 0) _exit(setuid(65534) == 0 && body() ? 0 : 1);
    int status = 0;
    waitpid(child, &status, 0);
    return status == 0;
  };
  std::string why;
  EXPECT_TRUE(as_nobody([&] {
    const Connection connection = connect_to(endpoint, 5, why);
    return connection.open() && is_another_users(connection);
  }));
  Admission admission(Connection(dup(listener.fd())), {}, 2);
  admission.serve([](int, int) { return Verdict::admitted; });
  EXPECT_EQ(admission.waiting(), 0u);
  const Connection same_user = connect_to(endpoint, 5, why);
  EXPECT_FALSE(is_another_users(same_user));
  admission.serve([](int, int) { return Verdict::admitted; });
  EXPECT_EQ(admission.waiting(), 1u);
}

}  // namespace
}  // namespace tandem::test
