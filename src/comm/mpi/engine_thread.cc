// The communication thread of Engine.

#include <fmt/format.h>
#include <pthread.h>
#include <signal.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <new>

#include "comm/mpi/engine.h"
#include "comm/mpi/mpi_wire.h"
#include "comm/mpi/socket_wire.h"
#include "comm/mpi/sockets.h"
#include "core/env.h"
#include "tandem/error.h"

namespace tandem::mpi {
namespace {

constexpr auto kLongSleep = std::chrono::minutes(1);

struct Neighbour {
  uint64_t host;
  SharedMemory::Handle control;
  char settings[64];
};

/// Throws on every rank or on none.
void require_same_settings(const std::vector<Neighbour>& all) {
  for (size_t rank = 1; rank < all.size(); ++rank) {
    if (std::string_view(all[rank].settings) == all[0].settings) continue;
    throw Mismatch(
        fmt::format("environment: rank 0 has {}, rank {} has {}: expected the same on "
                    "all ranks (mpirun -x NAME passes a variable on)",
                    all[0].settings, rank, all[rank].settings));
  }
}

// What a user has set stays.
void advise_open_mpi() {
  const std::string eager = std::to_string(kPieceBytes + 4096);
  for (const char* name : {"OMPI_MCA_btl_tcp_eager_limit", "OMPI_MCA_btl_tcp_rndv_eager_limit",
                           "OMPI_MCA_btl_tcp_max_send_size"}) {
    setenv(name, eager.c_str(), 0);
  }
}

bool has_fabric() {
  std::error_code error;
  const std::filesystem::directory_iterator devices("/sys/class/infiniband", error);
  return !error && devices != std::filesystem::directory_iterator();
}

}  // namespace

// One that the caller has initialised is left to the caller to finalise; this is out of it before.
void Engine::start_mpi(MPI_Comm base) {
  int ready = 0, level = 0, key = 0;
  MPI_Initialized(&ready);
  owns_mpi_ = !ready;
  if (owns_mpi_) {
    MPI_Init_thread(nullptr, nullptr, MPI_THREAD_FUNNELED, &level);
  } else {
    MPI_Comm_create_keyval(
        MPI_COMM_NULL_COPY_FN,
        [](MPI_Comm, int, void* engine, void*) {
          static_cast<Engine*>(engine)->leave();
          return MPI_SUCCESS;
        },
        &key, nullptr);
    MPI_Comm_set_attr(MPI_COMM_SELF, key, this);  // MPI_Finalize deletes it first of all
  }
  MPI_Comm_dup(base, &comm_);
  MPI_Comm_rank(comm_, &rank_);
  MPI_Comm_size(comm_, &size_);
}

void Engine::main(MPI_Comm base) {
  sigset_t signals;  // a broken connection is an error here, not a signal
  sigemptyset(&signals);
  sigaddset(&signals, SIGPIPE);
  pthread_sigmask(SIG_BLOCK, &signals, nullptr);
  advise_open_mpi();
  start_mpi(base);
  try {
    meet(comm_);
    wire_ = make_wire(comm_);
  } catch (...) {
    // All ranks are here, or none: who leaves MPI without this ends the others before they speak.
    try {
      throw;
    } catch (const Mismatch&) {
      if (owns_mpi_) MPI_Finalize();
    } catch (...) {
    }
    std::lock_guard lock(mutex_);
    start_error_ = std::current_exception();
    started_ = true;
    start_.notify_all();
    return;
  }
  {
    std::lock_guard lock(mutex_);
    started_ = true;
  }
  start_.notify_all();
  while (true) {
    bool moved = take_posted();
    moved |= wire_->progress();
    moved |= run_call();
    if (moved) continue;
    bool awaited = false;
    {
      std::lock_guard lock(mutex_);
      if (stopping_ && posted_.empty()) break;
      awaited = expecting_ > 0;
    }
    wire_->sleep(awaited, kLongSleep);
  }
  say_goodbye();
}

void Engine::meet(MPI_Comm comm) {
  control_ = SharedMemory::create(sizeof(Bell));
  bells_.assign(size_t(size_), nullptr);
  peer_controls_.resize(size_t(size_));
  bells_[size_t(rank_)] = new (control_->data()) Bell;
  Neighbour mine{host_identity(), control_->handle(), {}};
  shared_settings().copy(mine.settings, sizeof mine.settings - 1);
  std::vector<Neighbour> all(static_cast<size_t>(size_));
  MPI_Allgather(&mine, sizeof(mine), MPI_BYTE, all.data(), sizeof(mine), MPI_BYTE, comm);
  require_same_settings(all);
  int opened = env().mpi_shm, everywhere = 0, local_ranks = 1;
  for (int peer = 0; opened && peer < size_; ++peer) {
    if (peer == rank_ || all[size_t(peer)].host != mine.host) continue;
    ++local_ranks;
    try {
      auto& control = peer_controls_[size_t(peer)];
      control = SharedMemory::open(all[size_t(peer)].control, sizeof(Bell));
      bells_[size_t(peer)] = reinterpret_cast<Bell*>(control->data());
    } catch (const IoError&) {
      opened = 0;
    }
  }
  MPI_Allreduce(&opened, &everywhere, 1, MPI_INT, MPI_MIN, comm);
  for (int peer = 0; !everywhere && peer < size_; ++peer) {
    if (peer != rank_) bells_[size_t(peer)] = nullptr;
  }
  control_->seal();
  // With a core to spare a short spin is cheaper than a sleep; without, it keeps a peer from
  // running.
  spins_ = unsigned(local_ranks) < std::thread::hardware_concurrency() ? 400 : 20;
}

// Sockets, unless some host has a fabric that MPI reaches by something better.
std::unique_ptr<Wire> Engine::make_wire(MPI_Comm comm) {
  int sockets = env().mpi_wire == "tcp" || (env().mpi_wire == "auto" && !has_fabric());
  int everywhere = 0;
  WireSink& sink = *this;
  MPI_Allreduce(&sockets, &everywhere, 1, MPI_INT, MPI_MIN, comm);
  if (everywhere) {
    auto connected = connect_all(comm);
    if (!connected.empty()) {
      return std::make_unique<SocketWire>(std::move(connected), sink, waker_);
    }
    if (env().mpi_wire == "tcp") {
      throw IoError(
          "TANDEM_MPI_WIRE=tcp: the processes cannot all reach each other over TCP: expected a "
          "network between them");
    }
  }
  return std::make_unique<MpiWire>(comm, sink, waker_);
}

bool Engine::take_posted() {
  std::vector<Posted> posted;
  {
    std::lock_guard lock(mutex_);
    posted.swap(posted_);
  }
  for (auto& item : posted) wire_->send(item.peer, std::move(item.message), item.first);
  return !posted.empty();
}

bool Engine::run_call() {
  std::function<void(MPI_Comm)> work;
  {
    std::lock_guard lock(mutex_);
    if (!call_) return false;
    work = std::exchange(call_, nullptr);
  }
  work(comm_);
  {
    std::lock_guard lock(mutex_);
    calling_ = false;
  }
  called_.notify_all();
  return true;
}

// Every rank tells every other that it leaves, and stays until all have: until then a peer may
// still need this process to take its messages. After a failed run it waits only long enough for
// the others to hear of it and to print their own errors, and MPI_Finalize, which would wait for
// ranks that may be gone, is left out.
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
    wire_->send(peer, std::move(message), false);
  }
  const auto patience = Bell::Clock::now() + std::chrono::seconds(2);
  while (left_ < size_ - 1 || wire_->sending()) {
    if (failed && Bell::Clock::now() > patience) return;
    if (!wire_->progress()) wire_->sleep(false, std::chrono::milliseconds(failed ? 100 : 1000));
  }
  wire_->close();
  if (owns_mpi_) MPI_Finalize();
}

}  // namespace tandem::mpi
