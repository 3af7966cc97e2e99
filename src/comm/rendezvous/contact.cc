#include "comm/rendezvous/contact.h"

#include <algorithm>
#include <array>
#include <string>

#include "comm/rendezvous/addresses.h"
#include "comm/rendezvous/endpoint.h"

namespace tandem::control {
namespace {

// Limit per address, as the next one may be the reachable one.
constexpr double kProbeSeconds = 2;

/// Address of rank 0's store; empty on the other ranks.
struct Contact {
  FixedText<65> world;
  Digest key{};
  int port = 0;
  FixedText<480> failure;
  std::array<FixedText<48>, 8> addresses;
};

/// Opens rank 0's listener and fills `contact`.
Connection open_contact(Launch& launch, Contact& contact) {
  contact.key = random_digest();
  contact.world = launch.world = hex_of(random_digest());
  try {
    Connection listener = listen_on(endpoint_of(launch));
    contact.port = port_of(listener);
    const auto addresses = local_addresses();
    for (size_t i = 0; i < std::min(addresses.size(), contact.addresses.size()); ++i) {
      contact.addresses[i] = addresses[i];
    }
    return listener;
  } catch (const Error& error) {
    contact.failure = error.what();
    return {};
  }
}

/// First of rank 0's addresses that accepts a connection. If none does, its first one: joining
/// fails there, with an error that says why.
std::string reachable(const Contact& contact) {
  std::string why;
  for (const auto& address : contact.addresses) {
    const std::string host(address.view());
    if (!host.empty() && connect_to({"", host, contact.port}, kProbeSeconds, why).open()) {
      return host;
    }
  }
  return std::string(contact.addresses[0].view());
}

}  // namespace

StoreContact contact_rank_zero(std::string_view what, int rank, int size, bool one_host,
                               const Gather& gather) {
  StoreContact store;
  Launch& launch = store.launch;
  launch.rank = rank;
  launch.size = size;
  launch.one_host = one_host;
  Contact contact;
  if (rank == 0) store.listener = open_contact(launch, contact);
  contact = gather_all(gather, contact, size)[0];
  if (const auto failure = contact.failure.view(); !failure.empty()) {
    throw Error(fmt::format("{}: rank 0: {}", what, failure));
  }
  launch.world = contact.world.view();
  launch.port = contact.port;
  launch.host = one_host || rank == 0 ? "127.0.0.1" : reachable(contact);
  store.secret = {contact.key, std::string(what)};
  return store;
}

}  // namespace tandem::control
