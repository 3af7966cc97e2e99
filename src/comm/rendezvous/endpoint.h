// Where a hub listens. Where all ranks are on one host that is a local socket, and the system says
// which user is at its other end: no port is open, and no secret needed to keep others out. Between
// hosts it is a TCP port on every address of rank 0's, IPv6 and IPv4.
#pragma once

#include <string>

#include "comm/rendezvous/connection.h"
#include "comm/rendezvous/launch.h"

namespace tandem::control {

struct Endpoint {
  std::string local;  ///< the local socket's name; empty: TCP
  std::string host;
  int port = 0;
  std::string port_from = {};  ///< the variable that gave it, for errors
  /// "node7:29500", "[fe80::1]:29500", "local socket tandem-1000-29500-…".
  std::string describe() const;
};

Endpoint endpoint_of(const Launch& launch);

/// Throws Error that names the endpoint, and MASTER_PORT where that is taken. Port 0: any.
Connection listen_on(const Endpoint& endpoint);
int port_of(const Connection& listener);

/// Connects within `seconds`, the name's resolution aside, to the first address that takes it. Not
/// open when none does; `why` says what the last one answered. Throws Error for a name that nobody
/// knows.
Connection connect_to(const Endpoint& endpoint, double seconds, std::string& why);

/// Whether the other end of a local socket is this user's; of TCP nobody knows.
bool is_another_users(const Connection& connection);

/// The address of this end of a connection that others may reach this host by: `host`, the name
/// that it was made to, where both ends are on one host.
std::string own_address(const Connection& connection, const std::string& host);
/// Of the other end, for messages.
std::string peer_address(const Connection& connection);

}  // namespace tandem::control
