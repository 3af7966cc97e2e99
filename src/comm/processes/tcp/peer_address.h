// Address at which a rank listens for the connections of others, as it writes it to the store.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "comm/rendezvous/addresses.h"
#include "comm/rendezvous/connection.h"

namespace tandem::processes {

constexpr size_t kAddresses = 8;

using control::Interface;

struct PeerAddress {
  uint64_t host = 0;           ///< host_identity()
  uint32_t shares_memory = 0;  ///< with the other ranks of its host
  int32_t port = 0;            ///< 0: it does not listen
  uint32_t count = 0;
  std::array<Interface, kAddresses> interfaces;
};

/// Fills in the first addresses of this host.
void find_interfaces(PeerAddress& local);
/// Peer's addresses; those in one of this host's networks first.
std::vector<Interface> candidates(const PeerAddress& local, const PeerAddress& peer);
/// Starts a connection; not open if it fails at once, with the reason in errno, else it may still
/// be connecting.
control::Connection begin_to_connect(const Interface& interface, int port);

}  // namespace tandem::processes
