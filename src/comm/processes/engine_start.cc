// Startup of Engine: its ranks meet at the store. Every step costs a rank a fixed number of
// messages.

#include <fmt/format.h>

#include <new>
#include <thread>

#include "comm/processes/engine.h"
#include "comm/processes/tcp/socket_transport.h"
#include "comm/rendezvous/secret.h"
#include "comm/world/same_build.h"
#include "core/system/env.h"
#include "core/system/log.h"
#include "tandem/error.h"

namespace tandem::processes {
namespace {

constexpr const char* kAnyBuild = "any program (TANDEM_ALLOW_MIXED_BUILDS=1)";

template <typename T>
control::Blob bytes_of_value(const T& value) {
  const auto bytes = std::as_bytes(std::span(&value, 1));
  return {bytes.begin(), bytes.end()};
}

template <typename T>
T value_of(const control::Blob& bytes) {
  T value{};
  std::memcpy(&value, bytes.data(), std::min(bytes.size(), sizeof value));
  return value;
}

}  // namespace

void Engine::find_the_others(std::unique_ptr<Bootstrap> bootstrap) {
  bootstrap_ = std::move(bootstrap);
  rank_ = bootstrap_->rank();
  size_ = bootstrap_->size();
  ended_ = std::vector<std::atomic<uint64_t>>(size_t(size_));
  try {
    store_ = std::make_unique<control::StoreClient>(rank_, bootstrap_->connect_to_store());
    event_fd_.add(store_->fd());
    renew_lease();
    store_->watch("member/");
    store_->watch("abort/", true);
    require_same_program();
    share_memory();
    transport_ = make_transport();
  } catch (const std::exception& error) {
    const bool known = dynamic_cast<const Mismatch*>(&error) ||
                       dynamic_cast<const Aborted*>(&error) || dynamic_cast<const Timeout*>(&error);
    if (store_ && !known) {
      store_->set(control::kStartFailure, control::make_abort_value(rank_, error.what()));
    }
    if (store_) store_->leave();
    bootstrap_->failed(error);
    throw;
  }
}

void Engine::await_at_start(std::string_view what, const control::StoreClient::Pending& reply) {
  const auto on_start_event = [&](const control::Event& event) {
    const auto notice = control::read_abort_value(event.value);
    if (event.key == control::kStartFailure && notice)
      throw Aborted(notice->origin, notice->reason);
    if (event.change != control::Change::lost && event.change != control::Change::expired) {
      return on_event(event);  // of a rank that has started already
    }
    const int rank = int(control::number_of_key(event.key));
    throw Aborted(rank, fmt::format("rank {} ended without a word", rank));
  };
  const double seconds = bootstrap_->deadline_s();
  if (store_->await(reply, control::after(seconds), on_start_event)) return;
  const auto missing = store_->ask_missing(what);
  constexpr double kAnswerSeconds = 2;
  int peer = 0;
  if (store_->await(missing, control::after(kAnswerSeconds), on_start_event)) {
    const auto ranks = control::StoreClient::missing(*missing);
    if (!ranks.empty()) peer = ranks.front();
  }
  throw Timeout({what, peer}, rank_, 0, 0, seconds);
}

control::Met Engine::meet_at_start(std::string_view what, std::string_view compared) {
  const auto reply =
      store_->meet({.name = what, .count = size_, .index = rank_, .compared = compared});
  await_at_start(what, reply);
  return control::StoreClient::met(*reply);
}

void Engine::require_same_program() {
  const Build build = this_build();
  const std::string program = build.allowed ? kAnyBuild : build.text;
  const auto met = meet_at_start("first meeting", program + '\n' + shared_settings());
  if (met.differs < 0) return;
  const auto split_lines = [](const std::string& text) {
    const size_t line = text.find('\n');
    return std::pair(text.substr(0, line), text.substr(std::min(line, text.size() - 1) + 1));
  };
  const auto [first_program, first_settings] = split_lines(met.first);
  const auto [other_program, other_settings] = split_lines(met.other);
  if (first_program != other_program) {
    throw Mismatch(
        fmt::format("rank 0 runs {}; rank {} runs {}: expected the same program on all ranks "
                    "(TANDEM_ALLOW_MIXED_BUILDS=1 on all of them allows others)",
                    first_program, met.differs, other_program));
  }
  throw Mismatch(
      fmt::format("environment: rank 0 has {}, rank {} has {}: expected the same on "
                  "all ranks (mpirun -x NAME passes a variable on)",
                  first_settings, met.differs, other_settings));
}

bool Engine::open_waiters() {
  const std::string ranks = fmt::format("ranks/{:x}", host_),
                    key = fmt::format("waiters/{:x}", host_);
  const size_t bytes = size_t(size_) * kWaiterBytes;
  const auto number = store_->add(ranks, 1);
  await_at_start("shared memory", number);
  try {
    if (control::StoreClient::number(*number) == 1) {
      try {
        waiter_memory_ = SharedMemory::create(bytes);
      } catch (const IoError&) {
        store_->set(key, bytes_of_value(SharedMemory::Handle{}));
        throw;
      }
      store_->set(key, bytes_of_value(waiter_memory_->handle()));
    } else {
      const auto reply = store_->get(std::span(&key, 1), true);
      await_at_start("shared memory", reply);
      const auto handle =
          value_of<SharedMemory::Handle>(control::StoreClient::values(*reply).at(0));
      waiter_memory_ = SharedMemory::open(handle, bytes);
    }
  } catch (const IoError&) {
    return false;
  }
  waiters_ = waiter_memory_->data();
  return true;
}

void Engine::share_memory() {
  host_ = host_identity();
  memory_shared_ = env().mpi_shm && open_waiters();
  if (!memory_shared_) {
    waiter_memory_ = SharedMemory::create(kWaiterBytes);
    waiters_ = waiter_memory_->data() - size_t(rank_) * kWaiterBytes;
  }
  new (&waiter(rank_)) FutexWaiter;
  one_host_ = meet_at_start("hosts", fmt::format("{:x} {}", host_, memory_shared_)).differs < 0;
  int64_t local_ranks = 1;
  if (memory_shared_) {
    const auto number = store_->add(fmt::format("ranks/{:x}", host_), 0);
    await_at_start("shared memory", number);
    local_ranks = control::StoreClient::number(*number);
  }
  // A short spin is cheaper than a sleep if a core is free; otherwise it keeps a peer from running.
  spins_ = local_ranks < int64_t(std::thread::hardware_concurrency()) ? 400 : 20;
}

// Chooses sockets, unless a host has a fabric that MPI reaches over a better network.
std::unique_ptr<Transport> Engine::make_transport() {
  const bool sockets =
      env().mpi_transport == "tcp" || (env().mpi_transport == "auto" && !bootstrap_->has_fabric());
  const auto met = meet_at_start("transport", sockets ? "sockets" : "messages");
  const bool by_sockets = sockets && met.differs < 0;
  TransportSink& sink = *this;
  std::unique_ptr<PeerConnections> connections;
  if (!one_host_ || !memory_shared_) {
    PeerAddress address;
    if (by_sockets) {
      connections = std::make_unique<PeerConnections>(rank_, size_, connection_secret(), host_);
      address = connections->address();
    }
    address.host = host_;
    address.shares_memory = memory_shared_;
    store_->set(fmt::format("address/{}", rank_), bytes_of_value(address));
  }
  if (!by_sockets) return bootstrap_->make_transport(sink, event_fd_);
  const auto address_of = [this](int rank) {
    std::lock_guard lock(mutex_);
    return addresses_[rank];
  };
  return std::make_unique<SocketTransport>(std::move(connections), address_of, sink, event_fd_);
}

Digest Engine::connection_secret() {
  const std::string key = "connections";
  if (rank_ == 0) store_->set(key, control::random_digest());
  const auto reply = store_->get(std::span(&key, 1), true);
  await_at_start("connections", reply);
  return value_of<Digest>(control::StoreClient::values(*reply).at(0));
}

}  // namespace tandem::processes
