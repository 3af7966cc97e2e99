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
              std::has_unique_object_representations_v<Ruling> &&
              std::has_unique_object_representations_v<Header>);

enum class Role : uint64_t { rank = 1, hub = 2 };

template <typename T>
bool say(int fd, const T& message) {
  return send(fd, &message, sizeof message, MSG_NOSIGNAL | MSG_DONTWAIT) == ssize_t(sizeof message);
}

Digest proof(const Digest& key, Role role, const Digest& hub_nonce, const Answer& answer,
             const Ruling& ruling) {
  const struct {
    Role role;
    int32_t rank, size;
    Digest hub_nonce, rank_nonce;
    Verdict verdict;
    int32_t hub_size;
  } text{role, answer.rank, answer.size, hub_nonce, answer.nonce, ruling.verdict, ruling.size};
  static_assert(std::has_unique_object_representations_v<decltype(text)>);
  return hmac_sha256(key, std::as_bytes(std::span(&text, 1)));
}

}  // namespace

Digest proof_of_rank(const Digest& key, const Digest& hub_nonce, const Answer& answer) {
  return proof(key, Role::rank, hub_nonce, answer, {});
}

Digest proof_of_hub(const Digest& key, const Digest& hub_nonce, const Answer& answer,
                    const Ruling& ruling) {
  return proof(key, Role::hub, hub_nonce, answer, ruling);
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
template class Incoming<Ruling>;

Caller::Caller(int fd, const Credentials& credentials) : nonce_(random_digest()) {
  say(fd, Challenge{kMagic, credentials.secured(), nonce_});
}

bool Caller::proved(const Credentials& credentials) const {
  return equal_in_constant_time(answer().proof, proof_of_rank(credentials.key, nonce_, answer()));
}

void Caller::rule(int fd, const Credentials& credentials, Verdict verdict, int size) const {
  Ruling ruling{kMagic, verdict, 0, {}};
  if (verdict != Verdict::unproved) {
    ruling.size = size;
    ruling.proof = proof_of_hub(credentials.key, nonce_, answer(), ruling);
  }
  say(fd, ruling);
}

Applicant::Applicant(const Credentials& credentials, int rank, int size)
    : credentials_(credentials), answer_{kMagic,          rank, size, credentials.secured(),
                                         random_digest(), {}} {}

Applicant::State Applicant::advance(int fd) {
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
  const auto state = ruling_.read(fd);
  if (state == Incoming<Ruling>::State::waiting) return State::waiting;
  if (state != Incoming<Ruling>::State::whole) return failed(state);
  if (ruling().verdict == Verdict::unproved) return State::ruled;
  const Digest expected = proof_of_hub(credentials_.key, challenge_.get().nonce, answer_, ruling());
  return equal_in_constant_time(ruling().proof, expected) ? State::ruled : State::impostor;
}

}  // namespace tandem::control
