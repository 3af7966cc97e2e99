// Contact of ranks that no launcher connects, but that can already gather bytes from each other,
// for example over the caller's communicator. That way rank 0 sends the others the address of its
// rendezvous store, and a random secret for this world, without which the port admits no process.
#pragma once

#include <fmt/format.h>

#include <array>
#include <cstddef>
#include <cstring>
#include <functional>
#include <span>
#include <string_view>
#include <vector>

#include "comm/rendezvous/connection.h"
#include "comm/rendezvous/launch.h"
#include "comm/rendezvous/secret.h"
#include "tandem/error.h"

namespace tandem::control {

/// Collective: the bytes of every rank, concatenated. All ranks pass the same number of bytes.
using Gather = std::function<std::vector<std::byte>(std::span<const std::byte> local)>;

/// Collective: the value of every rank.
template <typename T>
std::vector<T> gather_all(const Gather& gather, const T& local, int size) {
  const auto bytes = gather(std::as_bytes(std::span(&local, 1)));
  std::vector<T> all(static_cast<size_t>(size));
  if (bytes.size() != all.size() * sizeof(T)) {
    throw Mismatch(fmt::format("rendezvous: {} ranks gathered {} bytes: expected {} of each", size,
                               bytes.size(), sizeof(T)));
  }
  std::memcpy(all.data(), bytes.data(), bytes.size());
  return all;
}

/// Text in values of fixed size; longer ones are cut.
template <size_t N>
struct FixedText {
  std::array<char, N> bytes{};
  FixedText& operator=(std::string_view text) {
    bytes = {};
    text.copy(bytes.data(), N - 1);
    return *this;
  }
  std::string_view view() const { return {bytes.data(), strnlen(bytes.data(), N)}; }
};

/// Address and secret by which ranks reach a store on rank 0.
struct StoreContact {
  Launch launch;
  Secret secret;        ///< new, for this world
  Connection listener;  ///< on rank 0
};

/// Collective. Rank 0 listens, and the others learn where. `what` names the call in errors. Throws
/// Error if rank 0 cannot listen.
StoreContact contact_rank_zero(std::string_view what, int rank, int size, bool one_host,
                               const Gather& gather);

}  // namespace tandem::control
