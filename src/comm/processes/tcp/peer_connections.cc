#include "comm/processes/tcp/peer_connections.h"

#include <fmt/format.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>

#include <cerrno>

#include "comm/rendezvous/endpoint.h"
#include "comm/rendezvous/secret.h"
#include "core/system/process/file_limit.h"

namespace tandem::processes {
namespace {

using control::Clock;
using control::PendingPeer;

constexpr double kPatienceSeconds = 10;
// Limits per address, as another one may be the reachable one.
constexpr double kConnectSeconds = 2, kHandshakeSeconds = 5, kPauseSeconds = 0.02;

bool is_ready(int fd, short events) {
  pollfd entry{fd, events, 0};
  return poll(&entry, 1, 0) > 0;
}

}  // namespace

PeerConnections::Call::Call(int peer, const PeerAddress& local, const PeerAddress& remote)
    : interfaces_(candidates(local, remote)),
      port_(remote.port),
      // Attempts of a rank's callers differ in time.
      until_(Clock::now()),
      gives_up_(control::after(kPatienceSeconds)),
      why_(fmt::format("rank {} has no address", peer)) {}

void PeerConnections::Call::pause(std::string why) {
  why_ = std::move(why);
  connection_.close();
  pending_peer_.reset();
  until_ = control::after(kPauseSeconds);
}

void PeerConnections::Call::begin() {
  pending_peer_.reset();
  connection_ = begin_to_connect(interfaces_[next_++ % interfaces_.size()], port_);
  until_ = control::after(kConnectSeconds);
  if (!connection_.open()) pause(describe_errno(errno));
}

PeerConnections::Call::State PeerConnections::Call::advance(const control::Credentials& credentials,
                                                            int rank, int size) {
  if (interfaces_.empty() || Clock::now() > gives_up_) return State::failed;
  if (!connection_.open()) {
    if (Clock::now() >= until_) begin();
    return State::calling;
  }
  if (Clock::now() > until_) {
    pause("no answer");
    return State::calling;
  }
  if (!pending_peer_) {
    if (!is_ready(connection_.fd(), POLLOUT)) return State::calling;
    int error = 0;
    socklen_t length = sizeof error;
    getsockopt(connection_.fd(), SOL_SOCKET, SO_ERROR, &error, &length);
    if (error != 0) {
      pause(describe_errno(error));
      return State::calling;
    }
    pending_peer_.emplace(credentials, rank, size);
    until_ = control::after(kHandshakeSeconds);
  }
  switch (pending_peer_->advance(connection_.fd())) {
    case PendingPeer::State::waiting:
      return State::calling;
    case PendingPeer::State::decided:
      if (pending_peer_->decision().verdict == control::Verdict::admitted) return State::answered;
      pause("refused");  // the peer calls this rank
      return State::calling;
    case PendingPeer::State::impostor:
    case PendingPeer::State::foreign:
      pause("another program listens there");
      return State::calling;
    case PendingPeer::State::gone:
      pause("the connection was closed");
      return State::calling;
  }
  return State::failed;
}

PeerConnections::PeerConnections(int rank, int size, const Digest& key, uint64_t host)
    : rank_(rank), size_(size), credentials_{key, "this world"} {
  local_.host = host;
  find_interfaces(local_);
  control::Connection listener = control::listen_on({"", "", 0});
  local_.port = control::port_of(listener);
  admission_.emplace(std::move(listener), credentials_, size_);
}

void PeerConnections::call(int peer, const PeerAddress& remote) {
  calls_.try_emplace(peer, peer, local_, remote);
}

std::vector<PeerConnections::Made> PeerConnections::advance() {
  std::vector<Made> made;
  accept(made);
  for (auto entry = calls_.begin(); entry != calls_.end();) {
    auto& [peer, call] = *entry;
    const auto state = call.advance(credentials_, rank_, size_);
    if (state == Call::State::calling) {
      ++entry;
      continue;
    }
    const bool answered = state == Call::State::answered;
    made.push_back(
        {peer, answered ? call.take() : control::Connection(), answered ? "" : call.why()});
    entry = calls_.erase(entry);
  }
  for (const Made& each : made) {
    const int on = 1;
    if (each.socket.open()) setsockopt(each.socket.fd(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  }
  return made;
}

void PeerConnections::accept(std::vector<Made>& made) {
  const auto check = [&](int peer, int size) {
    if (peer < 0 || peer >= size_ || peer == rank_ || size != size_) return control::Verdict::taken;
    const auto call = calls_.find(peer);
    const bool calls = call != calls_.end() && call->second.is_active();
    return calls && rank_ < peer ? control::Verdict::taken : control::Verdict::admitted;
  };
  for (auto& [connection, peer] : admission_->serve(check)) {
    calls_.erase(peer);
    made.push_back({peer, std::move(connection), {}});
  }
}

}  // namespace tandem::processes
