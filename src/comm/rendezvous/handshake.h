// How a rank and a hub prove to each other that they know the same secret, without saying it: each
// sends the HMAC-SHA-256, under the key of its world, of who the rank is and of both ends' random
// numbers. Those are new for every connection, so that nothing can be replayed, and the two proofs
// differ in their first byte, so that neither can be sent back as the other. The rank proves itself
// first: a stranger who connects gets a random number and no more.
//
// Neither end waits: both go on with what has come.
#pragma once

#include <string>

#include "comm/rendezvous/message.h"

namespace tandem::control {

/// One end's part in every handshake of its world.
struct Credentials {
  Digest key{};
  std::string source;  ///< where the secret in the key is from, for errors; empty: there is none
  bool secured() const { return !source.empty(); }
};

/// The beginning of a message of fixed size, as it comes over a socket that does not block.
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

/// The hub's view of one who has connected.
class Caller {
 public:
  /// Sends the challenge. A socket that cannot take it at once shows in `read`.
  Caller(int fd, const Credentials& credentials);
  Incoming<Answer>::State read(int fd) { return answer_.read(fd); }
  const Answer& answer() const { return answer_.get(); }
  /// Whether a whole answer's proof is right.
  bool proved(const Credentials& credentials) const;
  void rule(int fd, const Credentials& credentials, Verdict verdict, int size) const;

 private:
  Digest nonce_;
  Incoming<Answer> answer_;
};

/// The rank's end.
class Applicant {
 public:
  enum class State { waiting, ruled, impostor, foreign, gone };
  Applicant(const Credentials& credentials, int rank, int size);
  /// Goes on as far as it can. `ruled`: `ruling` has come, of a hub that is one or says no.
  State advance(int fd);
  const Ruling& ruling() const { return ruling_.get(); }
  bool hub_secured() const { return challenge_.get().secured != 0; }

 private:
  Credentials credentials_;
  Answer answer_{};
  bool answered_ = false;
  Incoming<Challenge> challenge_;
  Incoming<Ruling> ruling_;
};

/// Of the parts that `answer` has; what a hub expects in it.
Digest proof_of_rank(const Digest& key, const Digest& hub_nonce, const Answer& answer);
/// For the rank that sent `answer`.
Digest proof_of_hub(const Digest& key, const Digest& hub_nonce, const Answer& answer,
                    const Ruling& ruling);

}  // namespace tandem::control
