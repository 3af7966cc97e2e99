#include "comm/rendezvous/connect.h"

#include <fmt/format.h>
#include <poll.h>

#include <algorithm>
#include <thread>

#include "comm/rendezvous/endpoint.h"
#include "comm/wait_check.h"
#include "tandem/error.h"

namespace tandem::control {
namespace {

// Longer than a busy rank 0 keeps a pending peer (admission.cc).
constexpr double kHandshakeSeconds = 15;
constexpr auto kPause = std::chrono::milliseconds(20);

constexpr const char* kVariables = "TANDEM_SECRET or TANDEM_SECRET_FILE";

[[noreturn]] void throw_unproved(const Launch& launch, const Credentials& local,
                                 bool server_secured, const std::string& server) {
  const auto refuse = [&](const std::string& why) {
    throw InvalidArgument(
        fmt::format("rank {}: rank 0 at {} refuses it: {}: expected the same {} "
                    "on all ranks",
                    launch.rank, server, why, kVariables));
  };
  if (!server_secured) refuse(fmt::format("it has no secret, this rank has {}", local.source));
  if (!local.secured()) refuse(fmt::format("it has a secret, this rank has no {}", kVariables));
  refuse(fmt::format("the secret of {} is not its own, or it is of another world", local.source));
  __builtin_unreachable();
}

void check(const Launch& launch, const Credentials& local, const PendingPeer& peer,
           const std::string& server) {
  switch (peer.decision().verdict) {
    case Verdict::admitted:
      return;
    case Verdict::unproved:
      throw_unproved(launch, local, peer.server_secured(), server);
    case Verdict::other_size:
      throw Mismatch(
          fmt::format("world size: rank 0 has {}, rank {} has {}: expected the same on "
                      "all ranks",
                      peer.decision().size, launch.rank, launch.size));
    case Verdict::taken:
      throw InvalidArgument(
          fmt::format("rank {}: rank 0 at {} has one already: expected each rank "
                      "once",
                      launch.rank, server));
  }
}

}  // namespace

Connection join(const Launch& launch, const Credentials& credentials, double seconds) {
  const Endpoint endpoint = endpoint_of(launch);
  const std::string server = endpoint.describe();
  const auto until = after(seconds);
  constexpr const char* kCloses = "who listens there closes the connection";
  std::string why = "no answer";
  do {
    const double left = std::chrono::duration<double>(until - Clock::now()).count();
    Connection connection = connect_to(endpoint, left, why);
    if (connection.open() && is_another_users(connection)) {
      throw Error(fmt::format("{}: another user listens there: expected rank 0", server));
    }
    PendingPeer peer(credentials, launch.rank, launch.size);
    const auto patience = std::min(until, after(kHandshakeSeconds));
    auto state = connection.open() ? PendingPeer::State::waiting : PendingPeer::State::gone;
    // The deadline may have cut the last of several attempts.
    if (connection.open() && why != kCloses) why = "who listens there says nothing";
    while (state == PendingPeer::State::waiting && wait_until(connection.fd(), POLLIN, patience)) {
      state = peer.advance(connection.fd());
      if (state == PendingPeer::State::gone) why = kCloses;
    }
    switch (state) {
      case PendingPeer::State::decided:
        check(launch, credentials, peer, server);
        return connection;
      case PendingPeer::State::impostor:
        throw Error(
            fmt::format("{}: who listens there does not know the secret of {}: expected "
                        "rank 0",
                        server, credentials.secured() ? credentials.source : "this world"));
      case PendingPeer::State::foreign:
        why = "who listens there is no rank 0 of this version";
        break;
      case PendingPeer::State::waiting:
      case PendingPeer::State::gone:
        break;
    }
    std::this_thread::sleep_for(kPause);
    check_wait();
  } while (Clock::now() < until);
  throw Timeout({fmt::format("connect to {} ({})", server, why), 0}, launch.rank, 0, 0, seconds);
}

}  // namespace tandem::control
