// Untrusted bytes sent to a rendezvous server, and by a server to ranks: no peer is admitted
// without the secret, no damaged bytes become a message, and memory grows no larger than the bytes
// received.
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <span>

#include "comm/rendezvous/handshake.h"
#include "comm/rendezvous/message.h"
#include "comm/rendezvous/secret.h"
#include "tests/fuzz/require.h"

using namespace tandem::control;

namespace {

const Credentials& credentials() {
  static const Credentials random{tandem::control::random_digest(), "a random one"};
  return random;
}

// Feeds both ends' state machines with `bytes` in two parts.
void answer(std::span<const uint8_t> bytes, size_t cut) {
  int ends[2];
  REQUIRE(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, ends) == 0);
  Caller caller(ends[0], credentials());
  PendingPeer peer(credentials(), 1, 2);
  auto heard = Incoming<Answer>::State::waiting;
  for (const auto chunk : {bytes.first(cut), bytes.subspan(cut)}) {
    REQUIRE(send(ends[1], chunk.data(), chunk.size(), MSG_NOSIGNAL) == ssize_t(chunk.size()));
    if (heard == Incoming<Answer>::State::waiting) heard = caller.read(ends[0]);
  }
  REQUIRE(heard != Incoming<Answer>::State::gone);
  if (heard == Incoming<Answer>::State::whole) REQUIRE(!caller.proved(credentials()));
  close(ends[0]);
  close(ends[1]);
  REQUIRE(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, ends) == 0);
  auto state = PendingPeer::State::waiting;
  for (const auto chunk : {bytes.first(cut), bytes.subspan(cut)}) {
    REQUIRE(send(ends[1], chunk.data(), chunk.size(), MSG_NOSIGNAL) == ssize_t(chunk.size()));
    if (state == PendingPeer::State::waiting) state = peer.advance(ends[0]);
  }
  if (state == PendingPeer::State::decided) REQUIRE(peer.decision().verdict == Verdict::unproved);
  close(ends[0]);
  close(ends[1]);
}

void receive(std::span<const uint8_t> bytes, size_t step) {
  Inbox inbox;
  size_t taken = 0;
  for (size_t at = 0; at < bytes.size(); at += step) {
    inbox.append(std::as_bytes(bytes.subspan(at, std::min(step, bytes.size() - at))));
    Message message;
    while (inbox.take(message)) {
      REQUIRE(uint32_t(message.header.kind) <= uint32_t(kLastKind));
      REQUIRE(message.payload.size() ==
              size_t(message.header.name_bytes) + message.header.blob_bytes);
      taken += sizeof message.header + message.payload.size();
    }
    REQUIRE(!inbox.front());
  }
  REQUIRE(taken <= bytes.size());
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  const auto bytes = std::span(data, size).subspan(1);
  answer(bytes, std::min(bytes.size(), size_t(data[0])));
  receive(bytes, 1 + data[0]);
  return 0;
}
