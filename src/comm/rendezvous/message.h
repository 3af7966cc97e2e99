// Wire format of connections to the rendezvous store. First the handshake, three messages of fixed
// size (handshake.h): before a rank has proved its identity, nothing that it announces is trusted.
// Then messages: a fixed header, then a name and a blob of the lengths it gives.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "core/system/sha256.h"

namespace tandem::control {

/// First bytes of every handshake message; the last byte is the protocol's version.
constexpr std::array<char, 8> kMagic{'t', 'a', 'n', 'd', 'e', 'm', '\0', '\1'};

/// Server -> rank, when the rank has connected.
struct Challenge {
  std::array<char, 8> magic;
  uint64_t secured;  ///< whether the server has a secret
  Digest nonce;
};

/// Rank -> server.
struct Answer {
  std::array<char, 8> magic;
  int32_t rank, size;
  uint64_t secured;
  Digest nonce, proof;
};

enum class Verdict : uint32_t { admitted, unproved, other_size, taken };

/// Server -> rank. The proof is zeros if the rank's was wrong, to reveal nothing to strangers.
struct Decision {
  std::array<char, 8> magic;
  Verdict verdict;
  int32_t size;  ///< world size of the server
  Digest proof;
};

/// The store's messages (store_protocol.h), and the launcher's to its executors.
enum class Kind : uint32_t { overdue = 2, bye = 5, set, get, add, watch, meet, reply, event, met };
constexpr Kind kLastKind = Kind::met;

struct Header {
  Kind kind;
  int32_t rank;
  uint64_t value;  ///< number of the request
  uint32_t name_bytes, blob_bytes;
};

/// Max lengths that a message may announce.
constexpr uint32_t kMaxNameBytes = 64u << 10, kMaxBlobBytes = 64u << 20;
/// Throws InvalidArgument naming `what` and the lengths unless a message may announce them.
void require_lengths(std::string_view what, size_t name_bytes, size_t blob_bytes);

struct Message {
  Header header{};
  std::vector<std::byte> payload;
};

/// Reassembles messages from the received bytes. Stores only received bytes, whatever is announced.
class Inbox {
 public:
  void append(std::span<const std::byte> bytes);
  /// The bytes received are not a valid message: no more are accepted.
  bool damaged() const { return damaged_; }
  /// Header of the first message, if it is complete.
  const Header* front() const;
  bool take(Message& message);

 private:
  void look_at_first();
  size_t first_bytes() const;

  std::vector<std::byte> bytes_;
  Header first_{};  // valid if there are bytes for one
  bool damaged_ = false;
};

}  // namespace tandem::control
