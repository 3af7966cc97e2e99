// The handshake over a pair of sockets, and admission control with many pending peers.
#include "comm/rendezvous/handshake.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstring>
#include <optional>
#include <string>

#include "comm/rendezvous/admission.h"
#include "comm/rendezvous/endpoint.h"
#include "comm/rendezvous/secret.h"

namespace tandem::test {
namespace {

using namespace control;
using AnswerState = Incoming<Answer>::State;

const Credentials kOurs = credentials_of(read_secret("what only the ranks know", ""), "world");
const Credentials kOther = credentials_of(read_secret("what only others know", ""), "world");
const Credentials kOtherWorld = credentials_of(read_secret("what only the ranks know", ""), "w2");
const Credentials kNone = credentials_of({}, "world");

struct Pair {
  Connection server, rank;
  Pair() {
    int ends[2];
    EXPECT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, ends), 0);
    server = Connection(ends[0]);
    rank = Connection(ends[1]);
  }
};

template <typename T>
void put(const Connection& to, const T& message, size_t bytes = sizeof(T)) {
  ASSERT_EQ(send(to.fd(), &message, bytes, MSG_NOSIGNAL), ssize_t(bytes));
}

template <typename T>
T get(const Connection& from) {
  T message{};
  EXPECT_EQ(recv(from.fd(), &message, sizeof message, 0), ssize_t(sizeof message));
  return message;
}

// Verdict that a rank receives from a server with credentials `server` which would decide
// `verdict`.
PendingPeer::State handshake(const Credentials& server, const Credentials& rank, Verdict verdict,
                             std::optional<Verdict>& heard) {
  const Pair pair;
  Caller caller(pair.server.fd(), server);
  PendingPeer peer(rank, 2, 4);
  EXPECT_EQ(peer.advance(pair.rank.fd()), PendingPeer::State::waiting);
  EXPECT_EQ(caller.read(pair.server.fd()), AnswerState::whole);
  EXPECT_EQ(caller.answer().rank, 2);
  EXPECT_EQ(caller.answer().size, 4);
  caller.rule(pair.server.fd(), server, caller.proved(server) ? verdict : Verdict::unproved, 4);
  const auto state = peer.advance(pair.rank.fd());
  heard = peer.decision().verdict;
  return state;
}

TEST(Handshake, RanksWithTheSecretAreAdmitted) {
  std::optional<Verdict> heard;
  for (const auto& credentials : {kOurs, kNone}) {
    for (const Verdict verdict : {Verdict::admitted, Verdict::other_size, Verdict::taken}) {
      EXPECT_EQ(handshake(credentials, credentials, verdict, heard), PendingPeer::State::decided);
      EXPECT_EQ(heard, verdict);
    }
  }
}

TEST(Handshake, RanksWithoutTheSecretAreRefused) {
  std::optional<Verdict> heard;
  for (const auto& rank : {kOther, kOtherWorld, kNone}) {
    EXPECT_EQ(handshake(kOurs, rank, Verdict::admitted, heard), PendingPeer::State::decided);
    EXPECT_EQ(heard, Verdict::unproved);
  }
  EXPECT_EQ(handshake(kNone, kOurs, Verdict::admitted, heard), PendingPeer::State::decided);
  EXPECT_EQ(heard, Verdict::unproved);
}

TEST(Handshake, ServerMustProveThatItKnowsTheSecret) {
  const Pair pair;
  put(pair.server, Challenge{kMagic, 1, random_digest()});
  PendingPeer peer(kOurs, 2, 4);
  peer.advance(pair.rank.fd());
  const auto answer = get<Answer>(pair.server);
  // The rank's own proof, reflected.
  put(pair.server, Decision{kMagic, Verdict::admitted, 4, answer.proof});
  EXPECT_EQ(peer.advance(pair.rank.fd()), PendingPeer::State::impostor);
}

TEST(Handshake, ProofCoversEveryBitOfAnAnswer) {
  const Pair pair;
  Caller caller(pair.server.fd(), kOurs);
  const auto challenge = get<Challenge>(pair.rank);
  Answer right{kMagic, 2, 4, 1, random_digest(), {}};
  right.proof = proof_of_rank(kOurs.key, challenge.nonce, right);
  for (size_t bit = 8 * sizeof right.magic; bit < 8 * sizeof right; ++bit) {
    const size_t at = bit / 8;
    if (at >= offsetof(Answer, secured) && at < offsetof(Answer, nonce)) continue;  // a hint only
    Answer wrong = right;
    reinterpret_cast<unsigned char*>(&wrong)[at] ^= uint8_t(1 << bit % 8);
    EXPECT_FALSE(
        equal_in_constant_time(wrong.proof, proof_of_rank(kOurs.key, challenge.nonce, wrong)))
        << bit;
  }
  put(pair.rank, right);
  EXPECT_EQ(caller.read(pair.server.fd()), AnswerState::whole);
  EXPECT_TRUE(caller.proved(kOurs));
}

TEST(Handshake, AnswerIsValidForOneConnectionOnly) {
  const Pair first, second;
  Caller caller(first.server.fd(), kOurs), later(second.server.fd(), kOurs);
  PendingPeer peer(kOurs, 2, 4);
  peer.advance(first.rank.fd());
  const auto recorded = get<Answer>(first.server);
  put(second.rank, recorded);
  EXPECT_EQ(later.read(second.server.fd()), AnswerState::whole);
  EXPECT_FALSE(later.proved(kOurs));
}

TEST(Handshake, BytesMayArriveOneByOne) {
  const Pair pair;
  Caller caller(pair.server.fd(), kOurs);
  const auto challenge = get<Challenge>(pair.rank);
  Answer answer{kMagic, 2, 4, 1, random_digest(), {}};
  answer.proof = proof_of_rank(kOurs.key, challenge.nonce, answer);
  for (size_t i = 0; i < sizeof answer; ++i) {
    EXPECT_EQ(caller.read(pair.server.fd()), AnswerState::waiting);
    put(pair.rank, reinterpret_cast<const char*>(&answer)[i]);
  }
  EXPECT_EQ(caller.read(pair.server.fd()), AnswerState::whole);
  EXPECT_TRUE(caller.proved(kOurs));
}

TEST(Handshake, ForeignBytesAreDetectedAtOnce) {
  for (const std::string text : {"G", "GET / HTTP/1.1\r\n", "tandem", "\x16\x03\x01"}) {
    const Pair pair;
    Caller caller(pair.server.fd(), kOurs);
    ASSERT_EQ(send(pair.rank.fd(), text.data(), text.size(), 0), ssize_t(text.size()));
    EXPECT_EQ(caller.read(pair.server.fd()),
              text == "tandem" ? AnswerState::waiting : AnswerState::foreign);
  }
}

// Admission control on a local socket, and connections to it.
class AdmissionControl : public testing::Test {
 protected:
  Connection come() {
    std::string why;
    Connection connection = connect_to(endpoint_, 5, why);
    EXPECT_TRUE(connection.open()) << why;
    return connection;
  }
  std::vector<int> serve() {
    std::vector<int> ranks;
    // One event at the listener and one at each connection, in any order.
    for (int i = 0; i < 3; ++i) {
      for (const auto& entrant : admission_.serve([](int, int) { return Verdict::admitted; })) {
        ranks.push_back(entrant.rank);
      }
    }
    return ranks;
  }

  Endpoint endpoint_{"tandem-handshake-test-" + std::to_string(getpid()), "", 0};
  Admission admission_{listen_on(endpoint_), kOurs, 4};
};

TEST_F(AdmissionControl, SilentPeersAreBoundedAndDelayNoRank) {
  constexpr size_t kMax = 256 + 4;
  std::vector<Connection> silent;
  for (int i = 0; i < 600; ++i) {
    silent.push_back(come());
    serve();
    EXPECT_LE(admission_.waiting(), kMax);
  }
  EXPECT_EQ(admission_.waiting(), kMax);
  // The oldest were disconnected, the newest were not.
  char byte;
  recv(silent.front().fd(), &byte, 1, MSG_DONTWAIT | MSG_PEEK);
  Challenge challenge{};
  EXPECT_EQ(recv(silent.front().fd(), &challenge, sizeof challenge, 0), ssize_t(sizeof challenge));
  EXPECT_EQ(recv(silent.front().fd(), &byte, 1, 0), 0);
  const Connection rank = come();
  serve();
  PendingPeer peer(kOurs, 3, 4);
  EXPECT_EQ(peer.advance(rank.fd()), PendingPeer::State::waiting);
  EXPECT_EQ(serve(), std::vector<int>{3});
  EXPECT_EQ(peer.advance(rank.fd()), PendingPeer::State::decided);
  EXPECT_EQ(admission_.waiting(), kMax - 1);
}

TEST_F(AdmissionControl, PeersThatSendGarbageOrDisconnectAreDropped) {
  for (int i = 0; i < 50; ++i) {
    const Connection garbage = come(), dies = come();
    EXPECT_EQ(send(garbage.fd(), "SSH-2.0-x\r\n", 11, 0), 11);
    EXPECT_EQ(send(dies.fd(), kMagic.data(), 5, 0), 5);
    serve();
  }
  serve();
  EXPECT_EQ(admission_.waiting(), 0u);
  EXPECT_EQ(admission_.refused(), 0u);
}

TEST_F(AdmissionControl, WrongSecretsAreCounted) {
  for (int i = 0; i < 20; ++i) {
    const Connection connection = come();
    serve();
    PendingPeer peer(kOther, 1, 4);
    peer.advance(connection.fd());
    EXPECT_TRUE(serve().empty());
    EXPECT_EQ(peer.advance(connection.fd()), PendingPeer::State::decided);
    EXPECT_EQ(peer.decision().verdict, Verdict::unproved);
    EXPECT_EQ(peer.decision().proof, Digest{});
  }
  EXPECT_EQ(admission_.refused(), 20u);
  EXPECT_EQ(admission_.waiting(), 0u);
}

// Pending peers are disconnected in favour of new ones.
TEST_F(AdmissionControl, AdmitsRanksAfterRunningOutOfDescriptors) {
  std::vector<Connection> silent;
  for (int i = 0; i < 20; ++i) silent.push_back(come());
  serve();
  EXPECT_EQ(admission_.waiting(), 20u);
  const Connection rank = come();
  rlimit before{};
  getrlimit(RLIMIT_NOFILE, &before);
  const int next = dup(0);
  close(next);
  rlimit none = before;
  none.rlim_cur = rlim_t(next);
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &none), 0);
  serve();
  EXPECT_EQ(setrlimit(RLIMIT_NOFILE, &before), 0);
  EXPECT_EQ(admission_.waiting(), 20u);
  PendingPeer peer(kOurs, 1, 4);
  EXPECT_EQ(peer.advance(rank.fd()), PendingPeer::State::waiting);
  EXPECT_EQ(serve(), std::vector<int>{1});
}

}  // namespace
}  // namespace tandem::test
