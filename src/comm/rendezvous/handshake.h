// Handshake by which a rank and a rendezvous store prove to each other that they know the same
// secret without sending it: each sends the HMAC-SHA-256, under the key of its world, of the rank's
// identity and of both ends' random numbers. Those are new for every connection, so nothing can be
// replayed, and the two proofs differ in their first byte, so neither can be sent back as the
// other. The rank proves its identity first: a stranger who connects receives only a random number.
//
// Neither end blocks: both process the bytes that have arrived.
#pragma once

#include <string>

#include "comm/rendezvous/message.h"

namespace tandem::control {

/// Credentials of one end, used in every handshake of its world.
struct Credentials {
  Digest key{};
  std::string source;  ///< source of the key's secret, for errors; empty: there is none
  bool secured() const { return !source.empty(); }
};

/// Message of fixed size, received incrementally from a non-blocking socket.
template <typename T>
class Incoming {
 public:
  enum class State { waiting, whole, foreign, gone };
  State read(int fd);
  const T& get() const { return message_; }

 private:
  T message_{};
  size_t have_ = 0;
};

/// Store's side of a handshake.
class Caller {
 public:
  /// Sends the challenge. A failure to send it at once shows in `read`.
  Caller(int fd, const Credentials& credentials);
  Incoming<Answer>::State read(int fd) { return answer_.read(fd); }
  const Answer& answer() const { return answer_.get(); }
  /// Whether the proof in a complete answer is right.
  bool proved(const Credentials& credentials) const;
  void rule(int fd, const Credentials& credentials, Verdict verdict, int size) const;

 private:
  Digest nonce_;
  Incoming<Answer> answer_;
};

/// Rank's side of a handshake.
class PendingPeer {
 public:
  enum class State { waiting, decided, impostor, foreign, gone };
  PendingPeer(const Credentials& credentials, int rank, int size);
  /// Advances without blocking. `decided`: `decision` has arrived, from a server that proved its
  /// identity or that refuses the rank.
  State advance(int fd);
  const Decision& decision() const { return decision_.get(); }
  bool server_secured() const { return challenge_.get().secured != 0; }

 private:
  Credentials credentials_;
  Answer answer_{};
  bool answered_ = false;
  Incoming<Challenge> challenge_;
  Incoming<Decision> decision_;
};

/// Proof over all fields of `answer` but the proof; the server compares it with the one received.
Digest proof_of_rank(const Digest& key, const Digest& server_nonce, const Answer& answer);
/// Proof for the rank that sent `answer`.
Digest proof_of_server(const Digest& key, const Digest& server_nonce, const Answer& answer,
                       const Decision& decision);

}  // namespace tandem::control
