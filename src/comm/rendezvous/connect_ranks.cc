#include "comm/rendezvous/connect_ranks.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <map>

#include "comm/rendezvous/addresses.h"
#include "comm/rendezvous/control_communicator.h"
#include "comm/rendezvous/endpoint.h"
#include "comm/rendezvous/secret.h"
#include "tandem/error.h"

namespace tandem::control {
namespace {

// Limit per address, as the next one may be the reachable one.
constexpr double kProbeSeconds = 2;

template <size_t N>
using Text = std::array<char, N>;

template <size_t N>
void put_text(Text<N>& to, std::string_view text) {
  text.copy(to.data(), N - 1);
}
template <size_t N>
std::string_view text_in(const Text<N>& text) {
  return {text.data(), strnlen(text.data(), N)};
}

struct Word {
  Build build;
  Digest node{};
  Text<480> refusal{};
};

/// Address of rank 0's server; empty on the other ranks.
struct Contact {
  Text<65> world{};
  Digest key{};
  int port = 0;
  Text<480> failure{};
  std::array<Text<48>, 8> addresses{};
};

template <typename T>
std::vector<T> gather_all(const Gather& gather, const T& local, int size) {
  const auto bytes = gather(std::as_bytes(std::span(&local, 1)));
  std::vector<T> all(static_cast<size_t>(size));
  if (bytes.size() != all.size() * sizeof(T)) {
    throw Mismatch(fmt::format("control plane: {} ranks gathered {} bytes: expected {} of each",
                               size, bytes.size(), sizeof(T)));
  }
  std::memcpy(all.data(), bytes.data(), bytes.size());
  return all;
}

void check_words(std::string_view what, const Newcomer& local, const std::vector<Word>& words,
                 int max_ranks_of_node) {
  if (!local.refusal.empty()) throw InvalidArgument(fmt::format("{}: {}", what, local.refusal));
  std::map<Digest, int> of_nodes;
  for (size_t rank = 0; rank < words.size(); ++rank) {
    if (const auto refusal = text_in(words[rank].refusal); !refusal.empty()) {
      throw InvalidArgument(fmt::format("{}: rank {}: {}", what, rank, refusal));
    }
    ++of_nodes[words[rank].node];
  }
  for (const auto& [node, ranks] : of_nodes) {
    if (ranks <= max_ranks_of_node) continue;
    throw Unsupported(fmt::format("{}: {} ranks of one node: expected at most {}", what, ranks,
                                  max_ranks_of_node));
  }
}

/// Opens rank 0's listener and fills `contact`.
Connection open_contact(Launch& launch, Contact& contact) {
  contact.key = random_digest();
  put_text(contact.world, launch.world = hex_of(random_digest()));
  if (launch.size == 1) return {};
  try {
    Connection listener = listen_on(endpoint_of(launch));
    contact.port = port_of(listener);
    const auto addresses = local_addresses();
    for (size_t i = 0; i < std::min(addresses.size(), contact.addresses.size()); ++i) {
      put_text(contact.addresses[i], addresses[i]);
    }
    return listener;
  } catch (const Error& error) {
    put_text(contact.failure, error.what());
    return {};
  }
}

/// First of rank 0's addresses that accepts a connection. If none does, its first one: joining
/// fails there, with an error that says why.
std::string reachable(const Contact& contact) {
  std::string why;
  for (const auto& address : contact.addresses) {
    const std::string host(text_in(address));
    if (!host.empty() && connect_to({"", host, contact.port}, kProbeSeconds, why).open()) {
      return host;
    }
  }
  return std::string(text_in(contact.addresses[0]));
}

}  // namespace

ServerContact contact_rank_zero(std::string_view what, int rank, int size, bool one_host,
                                const Gather& gather) {
  ServerContact server;
  Launch& launch = server.launch;
  launch.rank = rank;
  launch.size = size;
  launch.one_host = one_host;
  Contact contact;
  if (rank == 0) server.listener = open_contact(launch, contact);
  contact = gather_all(gather, contact, size)[0];
  if (const auto failure = text_in(contact.failure); !failure.empty()) {
    throw Error(fmt::format("{}: rank 0: {}", what, failure));
  }
  launch.world = text_in(contact.world);
  launch.port = contact.port;
  if (launch.one_host) {
    launch.host = "127.0.0.1";
  } else {  // rank 0 sends its address to the members of groups that it leads
    launch.host = rank == 0 ? std::string(text_in(contact.addresses[0])) : reachable(contact);
  }
  server.secret = {contact.key, std::string(what)};
  return server;
}

Connected connect_ranks(std::string_view what, const Newcomer& local, const Gather& gather,
                        int max_ranks_of_node, double deadline_s) {
  Word word{local.build, sha256(std::as_bytes(std::span(local.node.data(), local.node.size())))};
  put_text(word.refusal, local.refusal);
  const auto words = gather_all(gather, word, local.size);
  std::vector<Build> builds;
  for (const Word& each : words) builds.push_back(each.build);
  require_same_build(builds);
  check_words(what, local, words, max_ranks_of_node);
  const bool one_host = std::all_of(words.begin(), words.end(),
                                    [&](const Word& each) { return each.node == words[0].node; });
  auto server = contact_rank_zero(what, local.rank, local.size, one_host, gather);
  return {std::make_shared<ControlCommunicator>(server.launch, server.secret,
                                                std::move(server.listener), deadline_s),
          server.launch.world};
}

}  // namespace tandem::control
