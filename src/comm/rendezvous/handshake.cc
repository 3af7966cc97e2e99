#include "comm/rendezvous/handshake.h"

#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <type_traits>

#include "comm/rendezvous/secret.h"

namespace tandem::control {
namespace {

// Messages are sent as their bytes in memory, and padding would leak stale data.
static_assert(std::has_unique_object_representations_v<Challenge> &&
              std::has_unique_object_representations_v<Answer> &&
              std::has_unique_object_representations_v<Decision> &&
              std::has_unique_object_representations_v<Header>);

enum class Role : uint64_t { rank = 1, server = 2 };

template <typename T>
bool say(int fd, const T& message) {
  return send(fd, &message, sizeof message, MSG_NOSIGNAL | MSG_DONTWAIT) == ssize_t(sizeof message);
}

Digest proof(const Digest& key, Role role, const Digest& server_nonce, const Answer& answer,
             const Decision& decision) {
  const struct {
    Role role;
    int32_t rank, size;
    Digest server_nonce, rank_nonce;
    Verdict verdict;
    int32_t server_size;
  } text{role,         answer.rank,      answer.size,  server_nonce,
         answer.nonce, decision.verdict, decision.size};
  static_assert(std::has_unique_object_representations_v<decltype(text)>);
  return hmac_sha256(key, std::as_bytes(std::span(&text, 1)));
}

}  // namespace

Digest proof_of_rank(const Digest& key, const Digest& server_nonce, const Answer& answer) {
  return proof(key, Role::rank, server_nonce, answer, {});
}

Digest proof_of_server(const Digest& key, const Digest& server_nonce, const Answer& answer,
                       const Decision& decision) {
  return proof(key, Role::server, server_nonce, answer, decision);
}

template <typename T>
typename Incoming<T>::State Incoming<T>::read(int fd) {
  while (have_ < sizeof(T)) {
    auto* to = reinterpret_cast<std::byte*>(&message_) + have_;
    const ssize_t got = recv(fd, to, sizeof(T) - have_, MSG_DONTWAIT);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) break;
    if (got <= 0) return State::gone;
    have_ += size_t(got);
    if (!std::equal(kMagic.begin(), kMagic.begin() + int64_t(std::min(have_, kMagic.size())),
                    message_.magic.begin())) {
      return State::foreign;
    }
  }
  return have_ == sizeof(T) ? State::whole : State::waiting;
}

template class Incoming<Challenge>;
template class Incoming<Answer>;
template class Incoming<Decision>;

Caller::Caller(int fd, const Credentials& credentials) : nonce_(random_digest()) {
  say(fd, Challenge{kMagic, credentials.secured(), nonce_});
}

bool Caller::proved(const Credentials& credentials) const {
  return equal_in_constant_time(answer().proof, proof_of_rank(credentials.key, nonce_, answer()));
}

void Caller::rule(int fd, const Credentials& credentials, Verdict verdict, int size) const {
  Decision decision{kMagic, verdict, 0, {}};
  if (verdict != Verdict::unproved) {
    decision.size = size;
    decision.proof = proof_of_server(credentials.key, nonce_, answer(), decision);
  }
  say(fd, decision);
}

PendingPeer::PendingPeer(const Credentials& credentials, int rank, int size)
    : credentials_(credentials), answer_{kMagic,          rank, size, credentials.secured(),
                                         random_digest(), {}} {}

PendingPeer::State PendingPeer::advance(int fd) {
  const auto failed = [](auto state) {
    return state == decltype(state)::foreign ? State::foreign : State::gone;
  };
  if (!answered_) {
    const auto state = challenge_.read(fd);
    if (state == Incoming<Challenge>::State::waiting) return State::waiting;
    if (state != Incoming<Challenge>::State::whole) return failed(state);
    answer_.proof = proof_of_rank(credentials_.key, challenge_.get().nonce, answer_);
    if (!say(fd, answer_)) return State::gone;
    answered_ = true;
  }
  const auto state = decision_.read(fd);
  if (state == Incoming<Decision>::State::waiting) return State::waiting;
  if (state != Incoming<Decision>::State::whole) return failed(state);
  if (decision().verdict == Verdict::unproved) return State::decided;
  const Digest expected =
      proof_of_server(credentials_.key, challenge_.get().nonce, answer_, decision());
  return equal_in_constant_time(decision().proof, expected) ? State::decided : State::impostor;
}

}  // namespace tandem::control
