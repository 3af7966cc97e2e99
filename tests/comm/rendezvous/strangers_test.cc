// Ten thousand foreign connections to rank 0's port, from before the world is complete until after:
// silent ones, garbage, half answers, wrong secrets, recorded answers, messages that announce
// gigabytes, and bytes that arrive one by one. The ranks must not notice, nor the process grow.
#include <dirent.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <fstream>
#include <thread>

#include "comm/rendezvous/endpoint.h"
#include "comm/rendezvous/handshake.h"
#include "tests/comm/rendezvous/processes.h"

namespace tandem::test {
namespace {

using namespace control;

constexpr int kStrangers = 10000, kRanks = 4;
constexpr double kDeadline = 200;

// Max time that a rank may be delayed by the machine, which ten thousand connections keep busy.
constexpr double kLongestExchange = 30;

template <typename T>
void say(const Connection& to, const T& message, size_t bytes = sizeof(T)) {
  send(to.fd(), &message, bytes, MSG_NOSIGNAL | MSG_DONTWAIT);
}

Answer answer_of(const Credentials& credentials, int rank) {
  Answer answer{kMagic, rank, kRanks, 1, random_digest(), {}};
  answer.proof = proof_of_rank(credentials.key, random_digest(), answer);
  return answer;
}

class Attack {
 public:
  explicit Attack(const Launch& launch)
      : launch_(launch), ours_(credentials_of(secret_of(launch), launch.world)) {
    rlimit limit{};
    getrlimit(RLIMIT_NOFILE, &limit);
    limit.rlim_cur = limit.rlim_max;
    setrlimit(RLIMIT_NOFILE, &limit);
    max_open_ = size_t(std::min<rlim_t>(limit.rlim_cur, 20000)) - 200;
  }

  void run() {
    for (int i = 0; i < kStrangers; ++i) {
      std::string why;
      Connection connection = connect_to({"", launch_.host, launch_.port}, 5, why);
      ++tried;
      if (!connection.open()) {  // no listener yet, or no longer
        std::this_thread::sleep_for(std::chrono::microseconds(100));
        continue;
      }
      ++connected;
      speak(connection, i);
      open_.push_back(std::move(connection));
      if (open_.size() > max_open_) open_.erase(open_.begin(), open_.begin() + 1000);
      if (i % 100 == 0) drip();
    }
  }

  std::atomic<int> tried = 0, connected = 0;

 private:
  void speak(const Connection& to, int i) {
    const int rank = i / 8 % kRanks;
    switch (i % 8) {
      case 0:
        return;  // silent
      case 1:
        return say(to, "GET / HTTP/1.1\r\n\r\n");
      case 2:
        return say(to, answer_of(ours_, rank), sizeof(Answer) / 2);
      case 3:
        return say(to, answer_of(credentials_of({}, launch_.world), rank));
      case 4:
        return say(to, answer_of(ours_, rank));  // valid once, for another connection
      case 5:
        return say(to, Header{Kind::set, rank, 0, ~0u, ~0u});
      case 6:
        return say(to, random_digest());
      case 7:
        slow_.push_back(int(open_.size()));
        return say(to, kMagic, 1);
    }
  }

  // Sends a byte on each of the slow connections.
  void drip() {
    for (const int i : slow_) {
      if (size_t(i) < open_.size()) say(open_[size_t(i)], 't', 1);
    }
    if (slow_.size() > 100) slow_.erase(slow_.begin(), slow_.begin() + 50);
  }

  Launch launch_;
  Credentials ours_;
  size_t max_open_;
  std::vector<Connection> open_;
  std::vector<int> slow_;
};

size_t descriptors(pid_t process) {
  size_t count = 0;
  DIR* directory = opendir(("/proc/" + std::to_string(process) + "/fd").c_str());
  if (!directory) return 0;
  while (readdir(directory)) ++count;
  closedir(directory);
  return count;
}

size_t resident_bytes(pid_t process) {
  std::ifstream file("/proc/" + std::to_string(process) + "/statm");
  size_t pages = 0, resident = 0;
  file >> pages >> resident;
  return resident * size_t(sysconf(_SC_PAGESIZE));
}

// Runs exchanges for `seconds`; none may take long.
int work(Communicator& comm, double seconds) {
  const auto until = after(seconds);
  double longest = 0;
  const std::string blob(1000, char('a' + comm.rank()));
  for (bool more = true; more;) {
    const auto begin = Clock::now();
    const bool last = begin > until;
    const auto all = comm.exchange(std::as_bytes(std::span(blob.data(), blob.size())), "work");
    longest = std::max(longest, std::chrono::duration<double>(Clock::now() - begin).count());
    if (int(all.size()) != comm.size()) return kWrong;
    const int continues = last ? 0 : 1;
    more = false;
    for (const auto& group : comm.exchange(std::as_bytes(std::span(&continues, 1)), "more")) {
      more = more || group[0] != std::byte{};
    }
  }
  if (longest > kLongestExchange) std::fprintf(stderr, "an exchange took %g s\n", longest);
  return longest <= kLongestExchange ? kRight : kWrong;
}

TEST(Strangers, TenThousandForeignConnectionsAreHarmless) {
  const Launch launch = make_launch(kRanks, false);
  const auto body = [](Communicator& comm) {
    const auto group = comm.split(comm.rank() % 2, 0);
    const int of_world = work(comm, 3), of_group = work(*group, 1);
    comm.barrier("end");
    return std::max(of_world, of_group);
  };
  auto children = start(launch, {0, 1, 2}, kDeadline, body);
  Attack attack(launch);
  std::thread attacker([&] { attack.run(); });
  // The last rank starts after half of the connections: the port is open until then.
  while (attack.connected < kStrangers / 2 && attack.tried < kStrangers) {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  const size_t open = descriptors(children[0]), resident = resident_bytes(children[0]);
  EXPECT_GE(attack.connected, kStrangers / 2);
  const auto others = start(launch, {3}, kDeadline, body);
  children.insert(children.end(), others.begin(), others.end());
  EXPECT_EQ(finish(children), std::vector<int>(kRanks, kRight));
  attacker.join();
  EXPECT_EQ(attack.tried, kStrangers);
  EXPECT_GT(open, 100u);  // they were connected
  EXPECT_LT(open, 400u);
  EXPECT_GT(resident, 0u);
  EXPECT_LT(resident, size_t(64) << 20);
}

// Silent connections are closed soon, even if no other peer connects.
TEST(Strangers, SilentPeersAreDisconnected) {
  const Launch launch = make_launch(2, false);
  const auto children = start(launch, {0}, kDeadline, [](Communicator& comm) {
    comm.barrier("start");
    return kRight;
  });
  std::string why;
  Connection silent;
  for (const auto until = after(20); !silent.open() && Clock::now() < until;) {
    silent = connect_to({"", launch.host, launch.port}, 1, why);
  }
  ASSERT_TRUE(silent.open()) << why;
  std::array<char, 256> heard;
  const auto begin = Clock::now();
  ASSERT_TRUE(wait_until(silent.fd(), POLLIN, after(20)));
  EXPECT_EQ(recv(silent.fd(), heard.data(), heard.size(), 0), ssize_t(sizeof(Challenge)));
  EXPECT_TRUE(wait_until(silent.fd(), POLLIN, after(30)));
  EXPECT_EQ(recv(silent.fd(), heard.data(), heard.size(), 0), 0);
  EXPECT_GT(Clock::now() - begin, std::chrono::seconds(5));  // a slow rank is not disconnected
  auto all = start(launch, {1}, kDeadline, [](Communicator& comm) {
    comm.barrier("start");
    return kRight;
  });
  all.push_back(children[0]);
  EXPECT_EQ(finish(all), std::vector<int>(2, kRight));
}

}  // namespace
}  // namespace tandem::test
