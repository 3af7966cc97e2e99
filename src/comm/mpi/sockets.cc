#include "comm/mpi/sockets.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <random>

#include "comm/mpi/shared_memory.h"

namespace tandem::mpi {
namespace {

using Clock = std::chrono::steady_clock;
constexpr size_t kAddresses = 8;
constexpr auto kPatience = std::chrono::seconds(10);

struct Place {
  uint32_t address = 0, mask = 0;  ///< network byte order; 0: none
};
struct Introduction {
  uint64_t host = 0;
  uint16_t port = 0;
  std::array<Place, kAddresses> places;
};
/// Sent by who connects and, with its own rank, by who accepts.
struct Hello {
  uint64_t cookie;
  int32_t rank;
};

/// The loopback address comes last: it leads to another process of this host only.
std::array<Place, kAddresses> my_places() {
  std::array<Place, kAddresses> places;
  ifaddrs* list = nullptr;
  if (getifaddrs(&list) != 0) return places;
  size_t count = 0;
  for (const bool loopback : {false, true}) {
    for (const ifaddrs* at = list; at && count < kAddresses; at = at->ifa_next) {
      if (!at->ifa_addr || at->ifa_addr->sa_family != AF_INET || !(at->ifa_flags & IFF_UP) ||
          bool(at->ifa_flags & IFF_LOOPBACK) != loopback) {
        continue;
      }
      places[count++] = {reinterpret_cast<const sockaddr_in*>(at->ifa_addr)->sin_addr.s_addr,
                         reinterpret_cast<const sockaddr_in*>(at->ifa_netmask)->sin_addr.s_addr};
    }
  }
  freeifaddrs(list);
  return places;
}

bool wait_for(int fd, short events, Clock::time_point deadline) {
  while (true) {
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now());
    pollfd entry{fd, events, 0};
    const int ready = poll(&entry, 1, int(std::max<int64_t>(left.count(), 0)));
    if (ready > 0) return true;
    if (ready == 0 || errno != EINTR) return false;
  }
}

template <typename Call>
bool transfer(int fd, size_t bytes, short events, Clock::time_point deadline, Call call) {
  for (size_t done = 0; done < bytes;) {
    const ssize_t moved = call(done);
    if (moved > 0) {
      done += size_t(moved);
    } else if (moved == 0 || (errno != EAGAIN && errno != EINTR)) {
      return false;
    } else if (!wait_for(fd, events, deadline)) {
      return false;
    }
  }
  return true;
}

bool say(const Socket& socket, const Hello& hello, Clock::time_point deadline) {
  const auto* from = reinterpret_cast<const char*>(&hello);
  return transfer(socket.get(), sizeof hello, POLLOUT, deadline, [&](size_t at) {
    return ::send(socket.get(), from + at, sizeof hello - at, MSG_NOSIGNAL);
  });
}

bool hear(const Socket& socket, Hello& hello, Clock::time_point deadline) {
  auto* to = reinterpret_cast<char*>(&hello);
  return transfer(socket.get(), sizeof hello, POLLIN, deadline,
                  [&](size_t at) { return ::recv(socket.get(), to + at, sizeof hello - at, 0); });
}

Socket new_socket() {
  return Socket(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
}

Socket listen_anywhere(int backlog, uint16_t& port) {
  Socket socket = new_socket();
  sockaddr_in name{};
  name.sin_family = AF_INET;
  socklen_t length = sizeof name;
  auto* address = reinterpret_cast<sockaddr*>(&name);
  if (!socket || bind(socket.get(), address, length) != 0 || listen(socket.get(), backlog) != 0 ||
      getsockname(socket.get(), address, &length) != 0) {
    return Socket();
  }
  port = name.sin_port;
  return socket;
}

Socket connect_to(const Place& place, uint16_t port, Clock::time_point deadline) {
  Socket socket = new_socket();
  sockaddr_in name{};
  name.sin_family = AF_INET;
  name.sin_port = port;
  name.sin_addr.s_addr = place.address;
  if (!socket) return socket;
  if (connect(socket.get(), reinterpret_cast<const sockaddr*>(&name), sizeof name) != 0) {
    int error = 0;
    socklen_t length = sizeof error;
    if (errno != EINPROGRESS || !wait_for(socket.get(), POLLOUT, deadline) ||
        getsockopt(socket.get(), SOL_SOCKET, SO_ERROR, &error, &length) != 0 || error != 0) {
      return Socket();
    }
  }
  return socket;
}

bool is_loopback(const Place& place) {
  return ntohl(place.address) >> 24 == 127;
}

/// The peer's addresses, those in one of our own networks first.
std::vector<Place> candidates(const Introduction& mine, const Introduction& peer) {
  std::vector<Place> places;
  for (const Place& place : peer.places) {
    if (place.address == 0 || (is_loopback(place) && peer.host != mine.host)) continue;
    places.push_back(place);
  }
  std::stable_partition(places.begin(), places.end(), [&](const Place& place) {
    return std::any_of(mine.places.begin(), mine.places.end(), [&](const Place& own) {
      return own.address != 0 && (own.address & own.mask) == (place.address & own.mask);
    });
  });
  return places;
}

// Every process calls those of lower rank, then answers those of higher rank, then hears the
// answers to its calls: the system completes a connection before it is accepted, so nobody waits in
// a ring.
class Meeting {
 public:
  explicit Meeting(MPI_Comm comm) : comm_(comm) {
    MPI_Comm_rank(comm, &rank_);
    MPI_Comm_size(comm, &size_);
    sockets_.resize(size_t(size_));
  }

  std::vector<Socket> hold() {
    Introduction mine{host_identity(), 0, my_places()};
    const Socket listener = listen_anywhere(size_, mine.port);
    std::vector<Introduction> all(static_cast<size_t>(size_));
    MPI_Allgather(&mine, sizeof mine, MPI_BYTE, all.data(), sizeof mine, MPI_BYTE, comm_);
    std::random_device random;
    cookie_ = uint64_t(random()) << 32 | random();
    MPI_Bcast(&cookie_, sizeof cookie_, MPI_BYTE, 0, comm_);
    deadline_ = Clock::now() + kPatience;
    int met = bool(listener), all_met = 0;
    for (int peer = 0; met && peer < rank_; ++peer) {
      met = call(peer, candidates(mine, all[size_t(peer)]), all[size_t(peer)].port);
    }
    for (int answered = rank_ + 1; met && answered < size_; ++answered) met = answer(listener);
    for (int peer = 0; met && peer < rank_; ++peer) met = hear_answer(peer);
    MPI_Allreduce(&met, &all_met, 1, MPI_INT, MPI_MIN, comm_);
    if (!all_met) return {};
    return std::move(sockets_);
  }

 private:
  bool call(int peer, const std::vector<Place>& places, uint16_t port) {
    for (const Place& place : places) {
      const auto soon = std::min(deadline_, Clock::now() + std::chrono::seconds(2));
      Socket socket = connect_to(place, port, soon);
      if (!socket || !say(socket, {cookie_, rank_}, soon)) continue;
      sockets_[size_t(peer)] = std::move(socket);
      return true;
    }
    return false;
  }

  /// Strangers are sent away.
  bool answer(const Socket& listener) {
    while (wait_for(listener.get(), POLLIN, deadline_)) {
      Socket socket(accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
      Hello hello{};
      const auto soon = std::min(deadline_, Clock::now() + std::chrono::seconds(2));
      if (!socket || !hear(socket, hello, soon) || hello.cookie != cookie_ || hello.rank <= rank_ ||
          hello.rank >= size_ || !say(socket, {cookie_, rank_}, soon)) {
        continue;
      }
      sockets_[size_t(hello.rank)] = std::move(socket);
      return true;
    }
    return false;
  }

  bool hear_answer(int peer) {
    Hello hello{};
    return hear(sockets_[size_t(peer)], hello, deadline_) && hello.cookie == cookie_ &&
           hello.rank == peer;
  }

  MPI_Comm comm_;
  int rank_ = 0, size_ = 1;
  uint64_t cookie_ = 0;
  Clock::time_point deadline_;
  std::vector<Socket> sockets_;
};

}  // namespace

Socket::~Socket() {
  if (fd_ >= 0) ::close(fd_);
}

std::vector<Socket> connect_all(MPI_Comm comm) {
  auto sockets = Meeting(comm).hold();
  for (const Socket& socket : sockets) {
    const int on = 1;
    if (socket) setsockopt(socket.get(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  }
  return sockets;
}

}  // namespace tandem::mpi
