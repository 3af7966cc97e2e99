// What is said over the control plane's connections. First the handshake, three messages of fixed
// size (handshake.h): before a rank has proved itself, nothing that it announces is believed. Then
// messages: a fixed header, and a name and a blob as long as it says.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "core/sha256.h"

namespace tandem::control {

/// What every message of the handshake begins with; its last byte is the protocol's version.
constexpr std::array<char, 8> kMagic{'t', 'a', 'n', 'd', 'e', 'm', '\0', '\1'};

/// hub -> rank, as soon as it has connected.
struct Challenge {
  std::array<char, 8> magic;
  uint64_t secured;  ///< whether the hub has a secret
  Digest nonce;
};

/// rank -> hub.
struct Answer {
  std::array<char, 8> magic;
  int32_t rank, size;
  uint64_t secured;
  Digest nonce, proof;
};

enum class Verdict : uint32_t { admitted, unproved, other_size, taken };

/// hub -> rank. The proof is zeros where the rank's was wrong: strangers learn nothing.
struct Ruling {
  std::array<char, 8> magic;
  Verdict verdict;
  int32_t size;  ///< the hub's
  Digest proof;
};

enum class Kind : uint32_t {
  blob,     ///< rank -> hub: its part of an exchange (payload: name, then blob)
  all,      ///< hub -> rank: everyone's parts, one message each; rank = whose
  overdue,  ///< rank -> hub: its deadline passed
  missing,  ///< hub -> rank: rank = the first that has not come, value = the exchange
  abort,    ///< both ways: rank = who failed, payload = why
  bye,      ///< rank -> hub: it needs nothing more; hub -> rank: it ends, nothing having failed
};

struct Header {
  Kind kind;
  int32_t rank;
  uint64_t value;  ///< the exchange's number
  uint32_t name_bytes, blob_bytes;
};

/// What a message may announce.
constexpr uint32_t kMostNameBytes = 64u << 10, kMostBlobBytes = 64u << 20;

struct Message {
  Header header{};
  std::vector<std::byte> payload;
};

/// Messages put together from bytes as they come. Holds what has come, whatever is announced.
class Inbox {
 public:
  void append(std::span<const std::byte> bytes);
  /// What came is no message: no more will be taken.
  bool damaged() const { return damaged_; }
  /// Of the first message, if all of it is here.
  const Header* front() const;
  bool take(Message& message);

 private:
  void look_at_first();
  size_t first_bytes() const;

  std::vector<std::byte> bytes_;
  Header first_{};  // where there are bytes for one
  bool damaged_ = false;
};

}  // namespace tandem::control
