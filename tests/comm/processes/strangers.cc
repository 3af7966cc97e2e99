// Run under launch.sh without shared memory: the processes form a world and connect to each other,
// again and again, while a thread of each floods its own listening sockets with foreign
// connections, silent ones and others, as soon as they exist. Prints "met" if every message comes
// from the right peer and none took long.
#include <fmt/format.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <string_view>
#include <thread>

#include "comm/processes/rank.h"
#include "comm/processes/rendezvous_bootstrap.h"

namespace {

using tandem::control::Connection;
using Clock = std::chrono::steady_clock;

constexpr int kMeetings = 10, kAtATime = 12, kMaxDescriptors = 512;
constexpr double kLongestSeconds = 5;  // waiting for the silent ones would take longer

std::atomic<bool> ended = false;
std::atomic<int> connected = 0;

// The port that `fd` listens on, or 0.
in_port_t port_of(int fd) {
  int accepts = 0;
  socklen_t length = sizeof accepts;
  if (getsockopt(fd, SOL_SOCKET, SO_ACCEPTCONN, &accepts, &length) != 0 || !accepts) return 0;
  sockaddr_in6 address{};
  length = sizeof address;
  if (getsockname(fd, reinterpret_cast<sockaddr*>(&address), &length) != 0) return 0;
  const bool tcp = address.sin6_family == AF_INET6 || address.sin6_family == AF_INET;
  return tcp ? address.sin6_port : 0;  // at the same offset in both
}

void attack() {
  constexpr std::string_view kGarbage = "tandem, says who?";
  std::vector<Connection> strangers;
  in_port_t last_port = 0;
  while (!ended) {
    for (int fd = 3; fd < kMaxDescriptors; ++fd) {
      const in_port_t port = port_of(fd);
      if (port == 0 || port == last_port) continue;
      last_port = port;
      sockaddr_in address{};
      address.sin_family = AF_INET;
      address.sin_port = port;
      address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
      strangers.clear();
      for (int i = 0; i < kAtATime; ++i) {
        Connection socket(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
        if (connect(socket.fd(), reinterpret_cast<sockaddr*>(&address), sizeof address) != 0) break;
        ++connected;
        if (i % 2 == 1) send(socket.fd(), kGarbage.data(), kGarbage.size(), MSG_NOSIGNAL);
        strangers.push_back(std::move(socket));
      }
    }
  }
}

/// Whether every rank of a new world hears from every other one over its own connection.
bool meets(tandem::Launch launch, int meeting) {
  launch.world += fmt::format(" {}", meeting);
  const auto comm =
      tandem::processes::new_member(std::make_unique<tandem::processes::RendezvousBootstrap>(
                                        launch, tandem::control::Secret{}, 30),
                                    {.deadline_s = 30});
  const int local = 1000 * meeting + launch.rank;
  const auto all = comm->exchange(std::as_bytes(std::span(&local, 1)), "numbers");
  bool right = comm->link() == "tcp" && int(all.size()) == launch.size;
  for (int rank = 0; right && rank < launch.size; ++rank) {
    int remote = -1;
    std::memcpy(&remote, all[size_t(rank)].data(), sizeof remote);
    right = remote == 1000 * meeting + rank;
  }
  comm->barrier("after");
  return right;
}

}  // namespace

int main() {
  const auto launch = tandem::launched_by_environment();
  if (!launch) return 2;
  std::thread attacker(attack);
  int right = 1;
  for (int meeting = 0; meeting < kMeetings; ++meeting) {
    const auto begin = Clock::now();
    if (!meets(*launch, meeting)) right = 0;
    const std::chrono::duration<double> took = Clock::now() - begin;
    if (took.count() < kLongestSeconds) continue;
    std::printf("rank %d: meeting %d took %g s\n", launch->rank, meeting, took.count());
    right = 0;
  }
  ended = true;
  attacker.join();
  if (connected < kAtATime) right = 0;  // too few foreign connections for a test
  std::printf("rank %d: %s\n", launch->rank, right ? "met" : "wrong");
  return right ? 0 : 1;
}
