#include "comm/control/control_communicator.h"

#include <arpa/inet.h>
#include <fmt/format.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <algorithm>
#include <chrono>
#include <cstring>

#include "core/env.h"
#include "observe/recorder.h"

namespace tandem::control {
namespace {

using Clock = std::chrono::steady_clock;

// How often a group looks for an abort at its world's hub while it waits for its own.
constexpr double kLookSeconds = 0.05;

// A rank asks who is missing once its deadline has passed, and gives the hub this long to say so.
constexpr double kAnswerSeconds = 2;

constexpr const char* kGone = "rank 0 ended without a word";

std::string_view text_of(const Message& message) {
  return {reinterpret_cast<const char*>(message.payload.data()), message.payload.size()};
}

class NoMemory final : public SymmetricBuffer {
 public:
  explicit NoMemory(int signals) { signals_ = signals; }
  std::byte* peer(int) const override { return nullptr; }
};

// The address that this end of `connection` has, and the port that `listener` got.
std::pair<std::string, int> address_of(const Connection& connection, const Connection& listener) {
  sockaddr_storage storage{};
  socklen_t length = sizeof storage;
  getsockname(connection.fd(), reinterpret_cast<sockaddr*>(&storage), &length);
  char text[INET6_ADDRSTRLEN] = {};
  if (storage.ss_family == AF_INET) {
    inet_ntop(AF_INET, &reinterpret_cast<sockaddr_in&>(storage).sin_addr, text, sizeof text);
  } else {
    inet_ntop(AF_INET6, &reinterpret_cast<sockaddr_in6&>(storage).sin6_addr, text, sizeof text);
  }
  length = sizeof storage;
  getsockname(listener.fd(), reinterpret_cast<sockaddr*>(&storage), &length);
  const auto port = storage.ss_family == AF_INET
                        ? reinterpret_cast<sockaddr_in&>(storage).sin_port
                        : reinterpret_cast<sockaddr_in6&>(storage).sin6_port;
  return {text, ntohs(port)};
}

}  // namespace

void Line::send(const Header& header, std::string_view name, std::span<const std::byte> blob) {
  const std::lock_guard lock(sending_);
  connection_.send(header, name.data(), blob.data());  // a hub that is gone shows in `receive`
}

Connection::Received Line::receive_now(Message& message) {
  if (aborted_) throw Aborted(*aborted_);
  if (ended_) return Connection::Received::gone;
  const auto received = connection_.receive(message, 0);
  if (received != Connection::Received::message) return received;
  if (message.header.kind == Kind::abort) {
    throw Aborted(aborted_.emplace(message.header.rank, std::string(text_of(message))));
  }
  ended_ = message.header.kind == Kind::bye;
  return ended_ ? Connection::Received::gone : received;
}

Connection::Received Line::receive(Message& message, double seconds) {
  if (!connection_.readable(seconds)) return Connection::Received::timeout;
  const std::lock_guard lock(receiving_);
  return receive_now(message);
}

void Line::look_for_abort() {
  const std::lock_guard lock(receiving_);
  if (aborted_) throw Aborted(*aborted_);
  if (ended_) return;
  Kind next{};
  const auto seen = connection_.peek(next);
  if (seen == Connection::Received::gone) throw Aborted(aborted_.emplace(0, kGone));
  Message message;
  if (seen == Connection::Received::message && (next == Kind::abort || next == Kind::bye)) {
    receive_now(message);
  }
}

ControlCommunicator::ControlCommunicator(const Launch& launch, Connection listener,
                                         double deadline_s, std::shared_ptr<Line> world)
    : Communicator(launch.rank, launch.size, deadline_s) {
  if (rank_ == 0) hub_.emplace(std::move(listener), size_);
  line_ = std::make_shared<Line>(rank_, connect_to(launch.host.c_str(), launch.port, deadline_s));
  if (!line_->open()) throw Timeout({"connect", 0}, rank_, 0, 0, deadline_s);
  world_ = world ? std::move(world) : line_;
  line_->send({Kind::hello, rank_, uint64_t(size_), 0, 0});
}

ControlCommunicator::ControlCommunicator(const Launch& launch, double deadline_s)
    : ControlCommunicator(
          launch, launch.rank == 0 ? listen_on(launch.host.c_str(), launch.port) : Connection(),
          deadline_s, nullptr) {}

ControlCommunicator::~ControlCommunicator() {
  line_->send({Kind::bye, rank_, 0, 0, 0});
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
  world_->send({Kind::abort, world_->rank(), 0, 0, uint32_t(reason.size())}, {},
               std::as_bytes(std::span(reason.data(), reason.size())));
}

Connection::Received ControlCommunicator::receive(Message& message, double seconds) {
  const auto until = Clock::now() + std::chrono::duration<double>(seconds);
  for (;;) {
    world_->look_for_abort();
    const double left = std::chrono::duration<double>(until - Clock::now()).count();
    const auto received = line_->receive(message, std::clamp(left, 0.0, kLookSeconds));
    if (received != Connection::Received::timeout || left <= 0) return received;
  }
}

std::vector<std::vector<std::byte>> ControlCommunicator::exchange(std::span<const std::byte> blob,
                                                                  std::string_view what) {
  line_->send({Kind::blob, rank_, round_, uint32_t(what.size()), uint32_t(blob.size())}, what,
              blob);
  std::vector<std::vector<std::byte>> all;
  std::string first;
  bool asked = false;
  while (int(all.size()) < size_) {
    Message message;
    const auto received = receive(message, asked ? kAnswerSeconds : deadline_s_);
    if (received == Connection::Received::timeout && !asked) {
      line_->send({Kind::overdue, rank_, round_, 0, 0});
      asked = true;
      continue;
    }
    const Header& header = message.header;
    if (received == Connection::Received::message && header.kind == Kind::all) {
      const std::string name(text_of(message).substr(0, header.name_bytes));
      if (all.empty()) first = name;
      if (name != first) {
        throw Mismatch(fmt::format("rank 0 is in {}, rank {} in {}: expected the same call", first,
                                   header.rank, name));
      }
      all.emplace_back(message.payload.begin() + header.name_bytes, message.payload.end());
      continue;
    }
    if (received == Connection::Received::gone) throw Aborted(0, kGone);
    const bool told = received == Connection::Received::message;
    throw Timeout({what, told ? header.rank : 0}, rank_, round_, 0, deadline_s_);
  }
  ++round_;
  return all;
}

std::unique_ptr<Communicator> ControlCommunicator::split(int color, int key) {
  struct Choice {
    int color, key;
  } mine{color, key};
  std::vector<std::pair<int, int>> order;  // (key, rank) of those with this color
  const auto choices = exchange(std::as_bytes(std::span(&mine, 1)), "split");
  for (int r = 0; r < size_; ++r) {
    Choice theirs{};
    std::memcpy(&theirs, choices[size_t(r)].data(), sizeof theirs);
    if (theirs.color == color) order.emplace_back(theirs.key, r);
  }
  std::sort(order.begin(), order.end());
  Launch group;
  group.size = int(order.size());
  while (order[size_t(group.rank)].second != rank_) ++group.rank;
  Connection listener;
  std::string address;
  if (group.rank == 0) {
    listener = listen_on(nullptr, 0);
    const auto [host, port] = address_of(line_->connection(), listener);
    address = fmt::format("{} {}", host, port);
  }
  const auto addresses =
      exchange(std::as_bytes(std::span(address.data(), address.size())), "split addresses");
  const auto& first = addresses[size_t(order[0].second)];
  const std::string text(reinterpret_cast<const char*>(first.data()), first.size());
  group.host = text.substr(0, text.find(' '));
  group.port = std::stoi(text.substr(text.find(' ') + 1));
  return std::unique_ptr<Communicator>(
      new ControlCommunicator(group, std::move(listener), deadline_s_, world_));
}

}  // namespace tandem::control

namespace tandem {

void run_control(const Launch& launch, const WorldOptions& options,
                 const std::function<void(Communicator&)>& body) {
  if (options.ranks != 1 && options.ranks != launch.size) {
    throw InvalidArgument(
        fmt::format("ranks {}: the launcher started {}: expected {} or none given", options.ranks,
                    launch.size, launch.size));
  }
  recorder().set_rank(launch.rank);
  control::ControlCommunicator comm(launch, world_deadline(options.deadline_s));
  try {
    body(comm);
  } catch (const Timeout&) {
    throw;  // the others wait for the same rank, and name it themselves
  } catch (const std::exception& error) {
    comm.abort(error.what());
    throw;
  }
}

}  // namespace tandem
