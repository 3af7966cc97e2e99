// Run under launch.sh: the processes connect to each other again and again while a thread of each
// floods its own listening socket with foreign connections, silent ones and others, as soon as it
// exists. Prints "met" if every connection leads to the right peer and none took long.
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <string_view>
#include <thread>

#include "comm/processes/rendezvous_bootstrap.h"
#include "comm/processes/sockets.h"

namespace {

using tandem::processes::Socket;
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
  std::vector<Socket> strangers;
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
        Socket socket(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
        if (connect(socket.get(), reinterpret_cast<sockaddr*>(&address), sizeof address) != 0)
          break;
        ++connected;
        if (i % 2 == 1) send(socket.get(), kGarbage.data(), kGarbage.size(), MSG_NOSIGNAL);
        strangers.push_back(std::move(socket));
      }
    }
  }
}

bool is_peer(const Socket& socket, int rank, int peer) {
  int remote = -1;
  pollfd entry{socket.get(), POLLIN, 0};
  return send(socket.get(), &rank, sizeof rank, MSG_NOSIGNAL) == ssize_t(sizeof rank) &&
         poll(&entry, 1, 5000) == 1 &&
         recv(socket.get(), &remote, sizeof remote, 0) == ssize_t(sizeof remote) && remote == peer;
}

}  // namespace

int main() {
  const auto launch = tandem::launched_by_environment();
  if (!launch) return 2;
  tandem::processes::RendezvousBootstrap bootstrap(*launch, 30);
  const int rank = bootstrap.rank();
  std::thread attacker(attack);
  int right = 1;
  for (int meeting = 0; meeting < kMeetings; ++meeting) {
    bootstrap.everywhere(true, "before");
    const auto begin = Clock::now();
    const auto sockets = tandem::processes::connect_all(bootstrap);
    const std::chrono::duration<double> took = Clock::now() - begin;
    if (sockets.empty() || took.count() > kLongestSeconds) {
      std::printf("rank %d: meeting %d: %zu sockets after %g s\n", rank, meeting, sockets.size(),
                  took.count());
      right = 0;
    }
    if (sockets.empty()) break;  // on every rank
    for (int peer = 0; peer < int(sockets.size()); ++peer) {
      if (peer != rank && !is_peer(sockets[size_t(peer)], rank, peer)) right = 0;
    }
    bootstrap.everywhere(true, "after");
  }
  ended = true;
  attacker.join();
  if (connected < kAtATime) right = 0;  // too few foreign connections for a test
  std::printf("rank %d: %s\n", rank, right ? "met" : "wrong");
  return right ? 0 : 1;
}
