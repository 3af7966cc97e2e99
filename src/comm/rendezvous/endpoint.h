// Endpoint on which a rendezvous store listens. If all ranks are on one host that is a local
// socket, and the system reports the user of its other end: no port is open, and no secret is
// needed. Between hosts it is a TCP port on every address of rank 0's host, IPv6 and IPv4.
#pragma once

#include <string>

#include "comm/rendezvous/connection.h"
#include "comm/rendezvous/launch.h"

namespace tandem::control {

struct Endpoint {
  std::string local;  ///< name of the local socket; empty: TCP
  std::string host;
  int port = 0;
  std::string port_from = {};  ///< variable that set the port, for errors
  /// Text such as "node7:29500", "[fe80::1]:29500", "local socket tandem-1000-29500-…".
  std::string describe() const;
};

Endpoint endpoint_of(const Launch& launch);

/// Seconds for a killed process to release its port.
constexpr double kPortPatienceS = 5;

/// Throws Error naming the endpoint, and MASTER_PORT if that is in use for `patience_s` seconds.
/// Port 0: any.
Connection listen_on(const Endpoint& endpoint, double patience_s = kPortPatienceS);
int port_of(const Connection& listener);

/// Connects within `seconds`, excluding name resolution, to the first address that accepts. Not
/// open if none does; `why` is then the last error. Throws Error for an unknown host name.
Connection connect_to(const Endpoint& endpoint, double seconds, std::string& why);

/// Whether the other end of a local socket belongs to another user; false for TCP, where it is
/// unknown.
bool is_another_users(const Connection& connection);

/// Address of the other end, for messages.
std::string peer_address(const Connection& connection);

}  // namespace tandem::control
