// Communication thread of Engine.

#include <fmt/format.h>
#include <pthread.h>
#include <signal.h>

#include <algorithm>
#include <functional>
#include <new>

#include "comm/processes/engine.h"
#include "comm/processes/socket_transport.h"
#include "comm/processes/sockets.h"
#include "comm/same_build.h"
#include "core/env.h"
#include "core/log.h"
#include "tandem/error.h"

namespace tandem::processes {
namespace {

constexpr auto kLongSleep = std::chrono::minutes(1);

struct Neighbour {
  uint64_t host;
  SharedMemory::Handle control;
  char settings[64];
};

/// Throws Mismatch, on every rank or on none, if settings differ.
void require_same_settings(const std::vector<Neighbour>& all) {
  for (size_t rank = 1; rank < all.size(); ++rank) {
    if (std::string_view(all[rank].settings) == all[0].settings) continue;
    throw Mismatch(
        fmt::format("environment: rank 0 has {}, rank {} has {}: expected the same on "
                    "all ranks (mpirun -x NAME passes a variable on)",
                    all[0].settings, rank, all[rank].settings));
  }
}

// Makes a broken connection an error, not a signal.
void block_sigpipe() {
  sigset_t signals;
  sigemptyset(&signals);
  sigaddset(&signals, SIGPIPE);
  pthread_sigmask(SIG_BLOCK, &signals, nullptr);
}

}  // namespace

void Engine::find_the_others(std::unique_ptr<Bootstrap> bootstrap) {
  bootstrap_ = std::move(bootstrap);
  rank_ = bootstrap_->rank();
  size_ = bootstrap_->size();
  ended_ = std::vector<std::atomic<uint64_t>>(size_t(size_));
  left_.assign(size_t(size_), false);
  left_[size_t(rank_)] = true;
  try {
    require_same_build(bootstrap_->gather(this_build(), "first meeting"));
    share_memory();
    transport_ = make_transport();
    bootstrap_->connected();
  } catch (const std::exception& error) {
    bootstrap_->failed(error);
    throw;
  }
}

void Engine::start_and_serve(const Start& start) {
  std::exception_ptr error;
  block_sigpipe();
  try {
    find_the_others(start(*this));
  } catch (...) {
    error = std::current_exception();
  }
  {
    std::lock_guard lock(mutex_);
    start_error_ = error;
    started_ = true;
  }
  start_.notify_all();
  if (!error) serve();
}

void Engine::serve() {
  block_sigpipe();
  while (true) {
    bool moved = take_posted();
    moved |= transport_->progress();
    moved |= run_call();
    if (moved) continue;
    bool awaited = false;
    {
      std::lock_guard lock(mutex_);
      if (stopping_ && posted_.empty()) break;
      awaited = expecting_ > 0;
    }
    transport_->sleep(awaited, kLongSleep);
  }
  say_goodbye();
}

void Engine::share_memory() {
  control_ = SharedMemory::create(sizeof(FutexWaiter));
  waiters_.assign(size_t(size_), nullptr);
  peer_controls_.resize(size_t(size_));
  waiters_[size_t(rank_)] = new (control_->data()) FutexWaiter;
  Neighbour local{host_identity(), control_->handle(), {}};
  shared_settings().copy(local.settings, sizeof local.settings - 1);
  const auto all = bootstrap_->gather(local, "first meeting");
  require_same_settings(all);
  bool opened = env().mpi_shm;
  int local_ranks = 1;
  for (int peer = 0; opened && peer < size_; ++peer) {
    if (peer == rank_ || all[size_t(peer)].host != local.host) continue;
    ++local_ranks;
    try {
      auto& control = peer_controls_[size_t(peer)];
      control = SharedMemory::open(all[size_t(peer)].control, sizeof(FutexWaiter));
      waiters_[size_t(peer)] = reinterpret_cast<FutexWaiter*>(control->data());
    } catch (const IoError&) {
      opened = false;
    }
  }
  const bool everywhere = bootstrap_->everywhere(opened, "shared memory");
  for (int peer = 0; !everywhere && peer < size_; ++peer) {
    if (peer != rank_) waiters_[size_t(peer)] = nullptr;
  }
  control_->seal();
  // A short spin is cheaper than a sleep if a core is free; otherwise it keeps a peer from running.
  spins_ = unsigned(local_ranks) < std::thread::hardware_concurrency() ? 400 : 20;
}

// Chooses sockets, unless a host has a fabric that MPI reaches over a better network.
std::unique_ptr<Transport> Engine::make_transport() {
  const bool sockets =
      env().mpi_transport == "tcp" || (env().mpi_transport == "auto" && !bootstrap_->has_fabric());
  TransportSink& sink = *this;
  if (bootstrap_->everywhere(sockets, "transport")) {
    auto connected = connect_all(*bootstrap_);
    if (!connected.empty()) {
      return std::make_unique<SocketTransport>(std::move(connected), sink, event_fd_);
    }
    if (env().mpi_transport == "tcp") {
      throw IoError(
          "TANDEM_MPI_TRANSPORT=tcp: the processes cannot all reach each other over TCP: expected "
          "a "
          "network between them");
    }
  }
  return bootstrap_->make_transport(sink, event_fd_);
}

bool Engine::take_posted() {
  std::vector<Posted> posted;
  {
    std::lock_guard lock(mutex_);
    posted.swap(posted_);
  }
  for (auto& item : posted) transport_->send(item.peer, std::move(item.message), item.first);
  return !posted.empty();
}

bool Engine::run_call() {
  std::function<void()> work;
  {
    std::lock_guard lock(mutex_);
    if (!call_) return false;
    work = std::exchange(call_, nullptr);
  }
  work();
  {
    std::lock_guard lock(mutex_);
    calling_ = false;
  }
  called_.notify_all();
  return true;
}

/// Ranks that have not left, as "rank 2, rank 3".
std::string Engine::describe_absent() const {
  std::string text;
  for (int rank = 0; rank < size_; ++rank) {
    if (left_[size_t(rank)]) continue;
    text += fmt::format("{}rank {}", text.empty() ? "" : ", ", rank);
  }
  return text;
}

// Tells every other rank that this one leaves, and stays until all have left: until then a peer may
// still need this process to accept its messages. After a failed run it waits only long enough for
// the others to receive the abort and print their own errors, and skips the bootstrap's end
// (MPI_Finalize), which would wait for ranks that may have exited. After the deadline it reports
// the ranks it waits for, and leaves if that is harmless: mpirun terminates all ranks when one ends
// without MPI_Finalize.
void Engine::say_goodbye() {
  bool failed = false;
  {
    std::lock_guard lock(mutex_);
    failed = failed_;
  }
  for (int peer = 0; peer < size_; ++peer) {
    if (peer == rank_) continue;
    auto message = std::make_unique<Outgoing>();
    message->header = {MessageKind::leave, 0, 0, 0, 0, 0, 0};
    transport_->send(peer, std::move(message), false);
  }
  using Seconds = std::chrono::duration<double>;
  const double patience = failed ? 2 : env().deadline_s;
  const auto until = FutexWaiter::Clock::now() +
                     std::chrono::duration_cast<FutexWaiter::Clock::duration>(Seconds(patience));
  bool said = false;
  while (!std::all_of(left_.begin(), left_.end(), std::identity()) || transport_->sending()) {
    if (FutexWaiter::Clock::now() > until) {
      if (failed) return;
      if (!std::exchange(said, true)) {
        log_message(LogLevel::warn,
                    fmt::format("rank {} has ended and waited {:.3g} s for {}, which {} not: {}",
                                rank_, patience, describe_absent(),
                                std::count(left_.begin(), left_.end(), false) == 1 ? "has" : "have",
                                bootstrap_->must_end_together() ? "it waits on" : "it leaves"));
      }
      if (!bootstrap_->must_end_together()) return;
    }
    if (!transport_->progress()) {
      transport_->sleep(false, std::chrono::milliseconds(patience < 10 ? 100 : 1000));
    }
  }
  transport_->close();
  bootstrap_->end();
}

}  // namespace tandem::processes
