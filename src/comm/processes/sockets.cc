#include "comm/processes/sockets.h"

#include <fmt/format.h>
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
#include <cstring>
#include <optional>
#include <string_view>

#include "comm/processes/shared_memory.h"
#include "comm/rendezvous/admission.h"
#include "comm/rendezvous/endpoint.h"
#include "comm/rendezvous/secret.h"
#include "tandem/error.h"

namespace tandem::processes {
namespace {

using control::Clock;
using control::PendingPeer;

constexpr size_t kAddresses = 8;
constexpr double kPatienceSeconds = 10;
// Limits per address, as another one may be the reachable one.
constexpr double kConnectSeconds = 2, kHandshakeSeconds = 5;

/// Address in IPv6 form; IPv4 is mapped.
struct Interface {
  in6_addr address{}, mask{};
};
struct Introduction {
  uint64_t host = 0;
  int port = 0;
  uint32_t count = 0;
  Digest key{};  ///< rank 0's is the world's
  std::array<Interface, kAddresses> interfaces;
};

in6_addr as_v6(const sockaddr* address, unsigned char fill) {
  in6_addr v6{};
  if (address->sa_family == AF_INET6) {
    return reinterpret_cast<const sockaddr_in6*>(address)->sin6_addr;
  }
  std::fill_n(v6.s6_addr, 12, fill);
  std::fill_n(v6.s6_addr + 10, 2, 0xff);
  std::memcpy(v6.s6_addr + 12, &reinterpret_cast<const sockaddr_in*>(address)->sin_addr, 4);
  return v6;
}

bool is_v4(const Interface& interface) {
  return IN6_IS_ADDR_V4MAPPED(&interface.address);
}

bool is_loopback(const Interface& interface) {
  return is_v4(interface) ? interface.address.s6_addr[12] == 127
                          : IN6_IS_ADDR_LOOPBACK(&interface.address);
}

/// Lists IPv4 before IPv6, and the loopback last: it reaches only other processes of this host.
/// Omits link-local addresses, which need an interface of the other host.
void find_interfaces(Introduction& local) {
  ifaddrs* list = nullptr;
  if (getifaddrs(&list) != 0) return;
  std::vector<Interface> interfaces;
  for (const ifaddrs* at = list; at; at = at->ifa_next) {
    if (!at->ifa_addr || !at->ifa_netmask || !(at->ifa_flags & IFF_UP)) continue;
    const auto family = at->ifa_addr->sa_family;
    if (family != AF_INET && family != AF_INET6) continue;
    const Interface interface { as_v6(at->ifa_addr, 0), as_v6(at->ifa_netmask, 0xff) };
    if (!IN6_IS_ADDR_LINKLOCAL(&interface.address)) interfaces.push_back(interface);
  }
  freeifaddrs(list);
  std::stable_partition(interfaces.begin(), interfaces.end(), is_v4);
  std::stable_partition(interfaces.begin(), interfaces.end(),
                        [](const Interface& interface) { return !is_loopback(interface); });
  local.count = uint32_t(std::min(interfaces.size(), kAddresses));
  std::copy_n(interfaces.begin(), local.count, local.interfaces.begin());
}

bool in_one_network(const Interface& local_address, const Interface& other) {
  for (size_t i = 0; i < sizeof local_address.address; ++i) {
    const int differ = local_address.address.s6_addr[i] ^ other.address.s6_addr[i];
    if (differ & local_address.mask.s6_addr[i]) return false;
  }
  return true;
}

/// Peer's addresses; those in one of this host's networks first.
std::vector<Interface> candidates(const Introduction& local, const Introduction& peer) {
  std::vector<Interface> interfaces;
  for (const Interface& interface : std::span(peer.interfaces).first(peer.count)) {
    if (!is_loopback(interface) || peer.host == local.host) interfaces.push_back(interface);
  }
  std::stable_partition(interfaces.begin(), interfaces.end(), [&](const Interface& interface) {
    const auto local_addresses = std::span(local.interfaces).first(local.count);
    return std::any_of(local_addresses.begin(), local_addresses.end(),
                       [&](const Interface& p) { return in_one_network(p, interface); });
  });
  return interfaces;
}

/// Starts a connection; not open if it fails at once, else it may still be connecting. `shortage`:
/// set to the error if this process could not create the socket.
control::Connection begin_to_connect(const Interface& interface, int port, int& shortage) {
  const int family = is_v4(interface) ? AF_INET : AF_INET6;
  control::Connection connection(::socket(family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!connection.open() && errno != EAFNOSUPPORT) shortage = errno;
  if (!connection.open()) return connection;
  sockaddr_in6 v6{};
  v6.sin6_family = AF_INET6;
  v6.sin6_port = htons(uint16_t(port));
  v6.sin6_addr = interface.address;
  sockaddr_in v4{};
  v4.sin_family = AF_INET;
  v4.sin_port = v6.sin6_port;
  std::memcpy(&v4.sin_addr, interface.address.s6_addr + 12, 4);
  const auto* address = family == AF_INET ? reinterpret_cast<const sockaddr*>(&v4)
                                          : reinterpret_cast<const sockaddr*>(&v6);
  const socklen_t length = family == AF_INET ? sizeof v4 : sizeof v6;
  if (connect(connection.fd(), address, length) != 0 && errno != EINPROGRESS) connection.close();
  return connection;
}

/// Connection attempt to a process of lower rank, at each of its addresses in turn.
class Call {
 public:
  Call(const control::Credentials& credentials, int rank, int size,
       std::vector<Interface> interfaces, int port)
      : credentials_(credentials),
        rank_(rank),
        size_(size),
        interfaces_(std::move(interfaces)),
        port_(port) {}

  bool answered() const { return answered_; }
  /// Error of a socket that could not be created; 0 if there was none.
  int shortage() const { return shortage_; }
  pollfd waits_for() const {
    return {answered_ ? -1 : connection_.fd(), short(pending_peer_ ? POLLIN : POLLOUT), 0};
  }
  Socket take() { return Socket(connection_.release()); }

  /// Advances without blocking; `ready`: the event of `waits_for` has occurred.
  void advance(bool ready) {
    if (answered_ || interfaces_.empty()) return;
    if (!connection_.open() || Clock::now() > until_) return begin();
    if (!ready) return;
    if (!pending_peer_) {
      int error = 0;
      socklen_t length = sizeof error;
      getsockopt(connection_.fd(), SOL_SOCKET, SO_ERROR, &error, &length);
      if (error != 0) return begin();
      pending_peer_.emplace(credentials_, rank_, size_);
      until_ = control::after(kHandshakeSeconds);
      return;
    }
    const auto state = pending_peer_->advance(connection_.fd());
    if (state == PendingPeer::State::waiting) return;
    answered_ = state == PendingPeer::State::decided &&
                pending_peer_->decision().verdict == control::Verdict::admitted;
    if (!answered_) begin();
  }

 private:
  void begin() {
    pending_peer_.reset();
    connection_ = begin_to_connect(interfaces_[next_++ % interfaces_.size()], port_, shortage_);
    until_ = control::after(kConnectSeconds);
  }

  control::Credentials credentials_;
  int rank_, size_;
  std::vector<Interface> interfaces_;
  int port_;
  size_t next_ = 0;
  int shortage_ = 0;
  control::Connection connection_;
  std::optional<PendingPeer> pending_peer_;  // once connected
  Clock::time_point until_;
  bool answered_ = false;
};

// Every process connects to those of lower rank and accepts those of higher rank, all concurrently:
// no process waits for a particular one, or for a stranger.
class Meeting {
 public:
  explicit Meeting(Bootstrap& bootstrap)
      : bootstrap_(bootstrap), rank_(bootstrap.rank()), size_(bootstrap.size()) {
    sockets_.resize(size_t(size_));
  }

  std::vector<Socket> hold() {
    Introduction local;
    local.host = host_identity();
    find_interfaces(local);
    Failure failure;
    control::Connection listener = listen(local.port, failure);
    local.key = control::random_digest();
    bool accepted = listener.open();
    const auto all = bootstrap_.gather(local, "addresses");
    const control::Credentials credentials{all[0].key, "this world"};
    if (accepted) {
      std::vector<Call> calls;
      for (int peer = 0; peer < rank_; ++peer) {
        const Introduction& remote = all[size_t(peer)];
        calls.emplace_back(credentials, rank_, size_, candidates(local, remote), remote.port);
      }
      try {
        control::Admission admission(std::move(listener), credentials, size_);
        accepted = accept_peers(admission, calls);
        if (!accepted) failure.note_shortage(admission, calls);
      } catch (const Error& error) {
        accepted = false;
        failure.note(error.what());
      }
    }
    refuse_shortage(failure);
    if (!bootstrap_.everywhere(accepted, "connections")) return {};
    return std::move(sockets_);
  }

 private:
  /// Shortage of descriptors or memory on this rank; an unreachable peer does not count.
  struct Failure {
    char text[200] = {};
    void note(std::string_view why) { why.copy(text, sizeof text - 1); }
    void note_shortage(const control::Admission& admission, const std::vector<Call>& calls) {
      int error = admission.shortage();
      for (const Call& call : calls) error = error ? error : call.shortage();
      if (error) note(fmt::format("a socket: {}", std::strerror(error)));
    }
  };

  /// Throws IoError on every rank or on none.
  void refuse_shortage(const Failure& failure) {
    const auto all = bootstrap_.gather(failure, "connections");
    for (size_t rank = 0; rank < all.size(); ++rank) {
      if (!all[rank].text[0]) continue;
      throw IoError(
          fmt::format("rank {}: connecting to the {} others: {} (ulimit -n says how many "
                      "files a process may have open)",
                      rank, size_ - 1, all[rank].text));
    }
  }

  static control::Connection listen(int& port, Failure& failure) {
    try {
      control::Connection listener = control::listen_on({"", "", 0});
      port = control::port_of(listener);
      return listener;
    } catch (const Error& error) {
      failure.note(error.what());
      return {};
    }
  }

  bool accept_peers(control::Admission& admission, std::vector<Call>& calls) {
    const auto deadline = control::after(kPatienceSeconds);
    while (Clock::now() < deadline) {
      std::vector<pollfd> waiting{{admission.fd(), POLLIN, 0}};
      for (const Call& call : calls) waiting.push_back(call.waits_for());
      poll(waiting.data(), waiting.size(), 20);
      answer(admission);
      for (size_t i = 0; i < calls.size(); ++i) calls[i].advance(waiting[i + 1].revents != 0);
      const auto answered = [](const Call& call) { return call.answered(); };
      if (answered_ < size_ - 1 - rank_ || !std::all_of(calls.begin(), calls.end(), answered)) {
        continue;
      }
      for (size_t peer = 0; peer < calls.size(); ++peer) sockets_[peer] = calls[peer].take();
      return true;
    }
    return false;
  }

  /// Accepts pending peers. A rank that connects again was not answered in time, and has closed its
  /// first connection.
  void answer(control::Admission& admission) {
    const auto check = [this](int rank, int size) {
      return rank > rank_ && rank < size_ && size == size_ ? control::Verdict::admitted
                                                           : control::Verdict::taken;
    };
    for (auto& [connection, rank] : admission.serve(check)) {
      Socket& socket = sockets_[size_t(rank)];
      if (!socket) ++answered_;
      socket = Socket(connection.release());
    }
  }

  Bootstrap& bootstrap_;
  const int rank_, size_;
  int answered_ = 0;
  std::vector<Socket> sockets_;
};

}  // namespace

Socket::~Socket() {
  if (fd_ >= 0) ::close(fd_);
}

std::vector<Socket> connect_all(Bootstrap& bootstrap) {
  auto sockets = Meeting(bootstrap).hold();
  for (const Socket& socket : sockets) {
    const int on = 1;
    if (socket) setsockopt(socket.get(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  }
  return sockets;
}

}  // namespace tandem::processes
