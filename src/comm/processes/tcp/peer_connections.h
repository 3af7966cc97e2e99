// TCP connections between two processes of a world, made when one of them first sends to the other:
// each listens on a port of its own, IPv6 and IPv4. A random secret of the world excludes strangers
// (comm/rendezvous/handshake.h), which are never waited for.
//
// If both call each other at once, the call of the lower rank counts, and it refuses the other's.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "comm/processes/tcp/peer_address.h"
#include "comm/rendezvous/admission.h"
#include "comm/rendezvous/handshake.h"

namespace tandem::processes {

class PeerConnections {
 public:
  /// Listens. `key`: the world's secret. Throws InvalidArgument or IoError.
  PeerConnections(int rank, int size, const Digest& key, uint64_t host);
  const PeerAddress& address() const { return local_; }

  /// Begins to connect to a peer, unless it has begun already.
  void call(int peer, const PeerAddress& remote);
  struct Made {
    int rank;
    control::Connection
        socket;  ///< non-blocking, without Nagle's delay; none if it could not be made
    std::string why;
  };
  /// Advances all without blocking.
  std::vector<Made> advance();
  /// Descriptor that is readable if a peer has connected.
  int fd() const { return admission_->fd(); }
  /// Whether `advance` must be called soon even if nothing is readable.
  bool calling() const { return !calls_.empty(); }

 private:
  class Call;
  void accept(std::vector<Made>& made);

  const int rank_, size_;
  const control::Credentials credentials_;
  PeerAddress local_;
  std::optional<control::Admission> admission_;
  std::map<int, Call> calls_;
};

/// Attempts to connect to a peer, at each of its addresses in turn.
class PeerConnections::Call {
 public:
  Call(int peer, const PeerAddress& local, const PeerAddress& remote);

  enum class State { calling, answered, failed };
  /// Advances without blocking.
  State advance(const control::Credentials& credentials, int rank, int size);
  /// Whether a connection is being made now, rather than after a pause.
  bool is_active() const { return connection_.open(); }
  control::Connection take() { return std::move(connection_); }
  const std::string& why() const { return why_; }

 private:
  void begin();
  void pause(std::string why);

  std::vector<Interface> interfaces_;
  int port_;
  size_t next_ = 0;
  control::Connection connection_;
  std::optional<control::PendingPeer> pending_peer_;  // once connected
  control::Clock::time_point until_, gives_up_;
  std::string why_;
};

}  // namespace tandem::processes
