// The communication thread of Engine.

#include <algorithm>
#include <cstdlib>
#include <new>

#include "comm/mpi/engine.h"
#include "core/env.h"
#include "tandem/error.h"

namespace tandem::mpi {
namespace {

using std::chrono::microseconds;

struct Introduction {
  uint64_t host;
  SharedMemory::Handle control;
};

// What a user has set stays.
void advise_open_mpi() {
  const std::string eager = std::to_string(kPieceBytes + 4096);
  for (const char* name : {"OMPI_MCA_btl_tcp_eager_limit", "OMPI_MCA_btl_tcp_rndv_eager_limit",
                           "OMPI_MCA_btl_tcp_max_send_size"}) {
    setenv(name, eager.c_str(), 0);
  }
}

}  // namespace

void Engine::main() {
  advise_open_mpi();
  int ready = 0, level = 0;
  MPI_Initialized(&ready);
  if (!ready) MPI_Init_thread(nullptr, nullptr, MPI_THREAD_FUNNELED, &level);
  MPI_Comm comm;
  MPI_Comm_dup(MPI_COMM_WORLD, &comm);
  MPI_Comm_rank(comm, &rank_);
  MPI_Comm_size(comm, &size_);
  try {
    meet(comm);
  } catch (...) {
    std::lock_guard lock(mutex_);
    start_error_ = std::current_exception();
    started_ = true;
    wake_.notify_all();
    return;
  }
  Wire wire(comm, *this);
  {
    std::lock_guard lock(mutex_);
    started_ = true;
  }
  wake_.notify_all();
  while (true) {
    bool moved = take_posted(wire);
    moved |= wire.progress();
    moved |= run_call(comm);
    {
      std::lock_guard lock(mutex_);
      if (stopping_ && posted_.empty()) break;
    }
    pause(moved);
  }
  say_goodbye(wire);
}

void Engine::meet(MPI_Comm comm) {
  control_ = SharedMemory::create(sizeof(Bell));
  bells_.assign(size_t(size_), nullptr);
  peer_controls_.resize(size_t(size_));
  bells_[size_t(rank_)] = new (control_->data()) Bell;
  const Introduction mine{host_identity(), control_->handle()};
  std::vector<Introduction> all(static_cast<size_t>(size_));
  MPI_Allgather(&mine, sizeof(mine), MPI_BYTE, all.data(), sizeof(mine), MPI_BYTE, comm);
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

bool Engine::take_posted(Wire& wire) {
  std::vector<Posted> posted;
  {
    std::lock_guard lock(mutex_);
    posted.swap(posted_);
  }
  for (auto& item : posted) wire.send(item.peer, std::move(item.message), item.first);
  return !posted.empty();
}

bool Engine::run_call(MPI_Comm comm) {
  std::function<void(MPI_Comm)> work;
  {
    std::lock_guard lock(mutex_);
    if (!call_) return false;
    work = std::exchange(call_, nullptr);
  }
  work(comm);
  {
    std::lock_guard lock(mutex_);
    calling_ = false;
  }
  called_.notify_all();
  return true;
}

// Polls eagerly while messages come and go, then ever more rarely: each look takes time from the
// computation beside it, and on a virtual machine a timer costs more than the look. The network
// goes on meanwhile, out of and into the system's socket buffers, with kLargeAtOnce messages to
// send: 2 MiB last 2 ms up to 1 GB/s. While the application waits, naps are short.
void Engine::pause(bool moved) {
  quiet_rounds_ = moved ? 0 : std::min(quiet_rounds_ + 1, 1000);
  if (moved) return;
  std::unique_lock lock(mutex_);
  if (!posted_.empty() || call_ || stopping_) return;
  microseconds nap(quiet_rounds_ < 20 ? 20 : 200);
  if (expecting_ == 0) {
    nap =
        microseconds(std::min(125 << std::min(quiet_rounds_, 6), all_share_memory() ? 5000 : 2000));
  }
  wake_.wait_for(lock, nap);
}

// Every rank tells every other that it leaves, and stays until all have: until then a peer may
// still need this process to take its messages. After a failed run it waits only long enough for
// the others to hear of it and to print their own errors, and MPI_Finalize, which would wait for
// ranks that may be gone, is left out.
void Engine::say_goodbye(Wire& wire) {
  bool failed = false;
  {
    std::lock_guard lock(mutex_);
    failed = failed_;
  }
  for (int peer = 0; peer < size_; ++peer) {
    if (peer == rank_) continue;
    auto message = std::make_unique<Outgoing>();
    message->header = {MessageKind::leave, 0, 0, 0, 0, 0, 0};
    wire.send(peer, std::move(message), false);
  }
  const auto patience = Bell::Clock::now() + std::chrono::seconds(2);
  while (left_ < size_ - 1 || wire.sending()) {
    if (failed && Bell::Clock::now() > patience) return;
    if (!wire.progress()) std::this_thread::sleep_for(microseconds(100));
  }
  wire.close();
  MPI_Finalize();
}

}  // namespace tandem::mpi
