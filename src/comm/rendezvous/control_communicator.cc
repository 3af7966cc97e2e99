#include "comm/rendezvous/control_communicator.h"

#include <fmt/format.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <chrono>
#include <cstring>

#include "comm/rendezvous/connect.h"
#include "comm/rendezvous/endpoint.h"
#include "comm/wait_check.h"
#include "core/env.h"
#include "core/file_limit.h"
#include "observe/recorder.h"

namespace tandem::control {
namespace {

// Interval at which a group polls its world's connection for an abort while it waits for its own.
constexpr double kLookSeconds = 0.05;

// Time for the rendezvous server to answer which rank is missing, once a rank's deadline has
// passed.
constexpr double kAnswerSeconds = 2;

// Time limit for messages sent with an abort or at the end, which must not delay a rank.
constexpr double kLastWordsSeconds = 2;

class NoMemory final : public SymmetricBuffer {
 public:
  explicit NoMemory(int signals) { signals_ = signals; }
  std::byte* peer(int) const override { return nullptr; }
};

std::pair<Connection, Connection> connected_pair() {
  int ends[2];
  if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends) != 0) {
    throw Error(fmt::format("socketpair: {}", describe_errno(errno)));
  }
  return {Connection(ends[0]), Connection(ends[1])};
}

// Listener of rank 0. Ports are open to strangers, so several hosts need a secret.
Connection listener_of_world(const Launch& launch, const Secret& secret) {
  if (launch.size > 1 && !launch.one_host && secret.source.empty()) {
    throw InvalidArgument(
        fmt::format("rank {} of {}, rank 0 at {}: no secret: ranks of several hosts expect "
                    "TANDEM_SECRET or TANDEM_SECRET_FILE, the same for all (ranks of one host need "
                    "none: MASTER_ADDR=127.0.0.1)",
                    launch.rank, launch.size, launch.host));
  }
  const bool listens = launch.rank == 0 && launch.size > 1;
  return listens ? listen_on(endpoint_of(launch)) : Connection();
}

void find_group(Launch& group, std::string_view address) {
  const size_t name = address.find(' '), port = address.find(' ', name + 1);
  group.world = address.substr(0, name);
  std::from_chars(address.data() + name + 1, address.data() + port, group.port);
  group.host = address.substr(port + 1);
}

}  // namespace

ControlCommunicator::ControlCommunicator(const Launch& launch, const Secret& secret,
                                         Connection listener, double deadline_s,
                                         std::shared_ptr<ServerConnection> world)
    : Communicator(launch.rank, launch.size, deadline_s), launch_(launch), secret_(secret) {
  const Credentials credentials = credentials_of(secret, launch.world);
  if (rank_ == 0) {
    auto [local, hubs] = connected_pair();
    server_.emplace(std::move(hubs), std::move(listener), credentials, size_);
    connection_ = std::make_shared<ServerConnection>(rank_, std::move(local));
  } else {
    connection_ = std::make_shared<ServerConnection>(rank_, join(launch, credentials, deadline_s));
  }
  world_ = world ? std::move(world) : connection_;
}

ControlCommunicator::ControlCommunicator(const Launch& launch, const Secret& secret,
                                         double deadline_s)
    : ControlCommunicator(launch, secret, listener_of_world(launch, secret), deadline_s, nullptr) {}

ControlCommunicator::~ControlCommunicator() {
  if (!process_.is_this_process()) return;
  connection_->send(kLastWordsSeconds, {Kind::bye, rank_, 0, 0, 0});
}

std::shared_ptr<SymmetricBuffer> ControlCommunicator::allocate(size_t bytes, int signals) {
  if (bytes > 0) throw Unsupported("allocate on the control plane: expected nccl or mpi");
  return std::make_shared<NoMemory>(signals);
}
void ControlCommunicator::put(int, SymmetricBuffer&, size_t, const void*, size_t, int, uint64_t) {
  throw Unsupported("put on the control plane: expected nccl or mpi");
}
uint64_t ControlCommunicator::read_signal(const SymmetricBuffer&, int) const {
  throw Unsupported("read_signal on the control plane: expected nccl or mpi");
}
void ControlCommunicator::wait(const SymmetricBuffer&, int, uint64_t epoch, const WaitSite&) {
  if (epoch > 0) throw Unsupported("wait on the control plane: expected nccl or mpi");
  world_->look_for_abort();
}

void ControlCommunicator::abort(const std::string& reason) {
  if (!process_.is_this_process()) return;
  const auto text =
      std::as_bytes(std::span(reason.data(), std::min<size_t>(reason.size(), kMaxBlobBytes)));
  world_->send(kLastWordsSeconds, {Kind::abort, world_->rank(), 0, 0, uint32_t(text.size())}, {},
               text);
}

ServerConnection::Received ControlCommunicator::receive(Message& message, double seconds) {
  const auto until = after(seconds);
  for (;;) {
    world_->look_for_abort();
    const double left = std::chrono::duration<double>(until - Clock::now()).count();
    const auto received = connection_->receive(message, std::clamp(left, 0.0, kLookSeconds));
    if (received != ServerConnection::Received::timeout || left <= 0) return received;
    check_wait();
  }
}

std::vector<std::vector<std::byte>> ControlCommunicator::exchange(std::span<const std::byte> blob,
                                                                  std::string_view what) {
  process_.require(what);
  require_lengths("exchange", what.size(), blob.size());
  const Header local{Kind::blob, rank_, round_, uint32_t(what.size()), uint32_t(blob.size())};
  if (!connection_->send(deadline_s_, local, what, blob)) {
    throw Timeout({what, 0}, rank_, round_, 0, deadline_s_);
  }
  std::vector<std::vector<std::byte>> all;
  std::string first;
  bool asked = false;
  while (int(all.size()) < size_) {
    Message message;
    const auto received = receive(message, asked ? kAnswerSeconds : deadline_s_);
    if (received == ServerConnection::Received::timeout && !asked) {
      connection_->send(kLastWordsSeconds, {Kind::overdue, rank_, round_, 0, 0});
      asked = true;
      continue;
    }
    const Header& header = message.header;
    if (received == ServerConnection::Received::message && header.kind == Kind::all) {
      const std::string name(text_of(message).substr(0, header.name_bytes));
      if (all.empty()) first = name;
      if (name != first) {
        throw Mismatch(fmt::format("rank 0 is in {}, rank {} in {}: expected the same call", first,
                                   header.rank, name));
      }
      all.emplace_back(message.payload.begin() + header.name_bytes, message.payload.end());
      continue;
    }
    if (received == ServerConnection::Received::gone) throw Aborted(0, kServerGone);
    const bool received_one = received == ServerConnection::Received::message;
    throw Timeout({what, received_one ? header.rank : 0}, rank_, round_, 0, deadline_s_);
  }
  ++round_;
  return all;
}

std::unique_ptr<Communicator> ControlCommunicator::split(int color, int key) {
  struct Choice {
    int color, key;
  } local{color, key};
  std::vector<std::pair<int, int>> order;  // (key, rank) of the ranks with this color
  const auto choices = exchange(std::as_bytes(std::span(&local, 1)), "split");
  for (int r = 0; r < size_; ++r) {
    Choice remote{};
    std::memcpy(&remote, choices[size_t(r)].data(), sizeof remote);
    if (remote.color == color) order.emplace_back(remote.key, r);
  }
  std::sort(order.begin(), order.end());
  Launch group = launch_;
  group.size = int(order.size());
  group.rank = 0;
  while (order[size_t(group.rank)].second != rank_) ++group.rank;
  Connection listener;
  std::string address;  // the group's name, port and host, from its first rank
  if (group.rank == 0 && group.size > 1) {
    group.world = hex_of(random_digest());
    group.port = 0;
    group.port_from.clear();
    listener = listen_on(endpoint_of(group));
    group.port = port_of(listener);
    if (rank_ != 0) group.host = host_address(connection_->connection(), launch_.host);
    address = fmt::format("{} {} {}", group.world, group.port, group.host);
  }
  const auto addresses =
      exchange(std::as_bytes(std::span(address.data(), address.size())), "split addresses");
  if (group.rank > 0) {
    const auto& first = addresses[size_t(order[0].second)];
    find_group(group, {reinterpret_cast<const char*>(first.data()), first.size()});
  }
  return std::unique_ptr<Communicator>(
      new ControlCommunicator(group, secret_, std::move(listener), deadline_s_, world_));
}

}  // namespace tandem::control

namespace tandem {

void check_launched(const WorldOptions& options, const Launch& launch) {
  if (options.ranks == 1 || options.ranks == launch.size) return;
  throw InvalidArgument(fmt::format("ranks {}: the launcher started {}: expected {} or none given",
                                    options.ranks, launch.size, launch.size));
}

void run_control(const Launch& launch, const control::Secret& secret, const WorldOptions& options,
                 const std::function<void(Communicator&)>& body) {
  check_launched(options, launch);
  recorder().set_rank(launch.rank);
  control::ControlCommunicator comm(launch, secret, world_deadline(options.deadline_s));
  try {
    body(comm);
  } catch (const Timeout& error) {
    comm.end_with(error.what());
    throw;
  } catch (const std::exception& error) {
    comm.abort(error.what());
    throw;
  }
}

}  // namespace tandem
