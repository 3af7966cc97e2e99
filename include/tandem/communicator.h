// Communicator: ranks, symmetric buffers and the one primitive everything is written on,
// put-with-signal.
//
// Guarantees, on every transport:
//  - `put` is asynchronous: its source must stay unchanged until `flush` (or until the receiver's
//    answer proves delivery). Bytes become visible to the peer before the signal does.
//  - Puts from one rank to one peer become visible in the order they were issued.
//  - A signal is a 64-bit word that only grows: a put raises it to `epoch`, `wait` returns once it
//    is >= `epoch`. One writer per signal. Epochs are never reset, so no barrier is needed before
//    a buffer is used again, only an epoch (or acknowledgement signal) that proves it was read.
//  - Transfers progress without the application polling.
//  - Every wait ends: with the signal, with Timeout after the deadline, or with Aborted.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "tandem/error.h"
#include "tandem/export.h"

namespace tandem {
class Workspace;  // internal
}

TANDEM_API_BEGIN
namespace tandem {

/// Memory of the same size on every rank of a communicator, with `signals` signal words, all zero
/// at first. Created by Communicator::allocate. Zero-filled. Must not outlive its communicator.
/// Ranks may destroy theirs at any time and in any order: puts to one that is gone harm nothing.
/// `nccl`: its memory is freed when all ranks have destroyed theirs and meet in the next `allocate`
/// (constructing an operator allocates), or when the communicator is destroyed.
class SymmetricBuffer {
 public:
  virtual ~SymmetricBuffer() = default;
  std::byte* local() const { return local_; }
  size_t bytes() const { return bytes_; }
  int signals() const { return signals_; }
  /// `rank`'s copy when plain loads and stores reach it, else nullptr.
  virtual std::byte* peer(int rank) const = 0;

 protected:
  std::byte* local_ = nullptr;
  size_t bytes_ = 0;
  int signals_ = 0;
};

/// One rank's end of a group of ranks. Calls on one Communicator come from one thread at a time,
/// except `abort`, which any thread may call. Collective calls (allocate, split, exchange, barrier)
/// are made by all ranks in the same order.
class Communicator : public std::enable_shared_from_this<Communicator> {
 public:
  virtual ~Communicator() = default;
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  int rank() const { return rank_; }
  int size() const { return size_; }
  /// "threads", "mpi", "processes", "nccl" or "one_gpu".
  virtual std::string_view transport() const = 0;
  /// Whether its ranks are GPUs (tandem/cuda.h) and its tensors device memory.
  virtual bool on_gpu() const { return false; }
  /// What the bytes cross, as benchmarks print it: "shm", "tcp", "emulated 1.0 GB/s 20 us".
  virtual std::string link() const = 0;

  /// Collective. Throws Mismatch on every rank when `bytes` or `signals` differ. If one rank cannot
  /// get its memory, every rank throws IoError (`nccl`: DeviceError), which names it.
  virtual std::shared_ptr<SymmetricBuffer> allocate(size_t bytes, int signals) = 0;

  /// Delivers source[0, bytes) to offset in `peer`'s copy of `buffer`, then raises the peer's
  /// `signal` to `epoch`. bytes may be 0 (signal only); `peer` may be this rank.
  /// Throws InvalidArgument when peer, range or signal is out of bounds.
  virtual void put(int peer, SymmetricBuffer& buffer, size_t offset, const void* source,
                   size_t bytes, int signal, uint64_t epoch) = 0;
  /// Returns when every earlier put's source may be overwritten.
  virtual void flush() = 0;
  /// The local value of `signal` (acquire).
  virtual uint64_t read_signal(const SymmetricBuffer& buffer, int signal) const = 0;
  /// Blocks until local `signal` >= `epoch`; throws Timeout (after `deadline()`) or Aborted.
  virtual void wait(const SymmetricBuffer& buffer, int signal, uint64_t epoch,
                    const WaitSite& site) = 0;

  /// Ends every rank's current and later waits with Aborted, on this communicator and on all that
  /// were split from the same world. Not collective; any thread. A wait for epoch 0, which does not
  /// block, notices it too. `nccl`: the host notices it when it waits itself, or for its stream
  /// through the communicator, and then ends the waits of its GPU.
  virtual void abort(const std::string& reason) = 0;
  /// Collective: one communicator per distinct `color`, ranks ordered by (key, rank).
  virtual std::unique_ptr<Communicator> split(int color, int key) = 0;

  /// Collective: every rank's (small) blob, by rank. Blobs may differ in length.
  virtual std::vector<std::vector<std::byte>> exchange(std::span<const std::byte> blob,
                                                       std::string_view what) = 0;
  /// Collective: returns after every rank has entered. Throws Timeout naming a rank that has not.
  void barrier(std::string_view what = "barrier") { exchange({}, what); }
  /// Collective: throws Mismatch, on every rank, naming `what`, the two ranks and both values,
  /// unless all ranks pass the same `value`.
  void require_same(std::string_view what, std::string_view value);

  /// Seconds a wait lasts at most. Default 60, or TANDEM_DEADLINE_S.
  double deadline() const { return deadline_s_; }
  /// Throws InvalidArgument unless from 0.001 to 1e9.
  void set_deadline(double seconds);

  /// Staging memory and epochs of the plain collectives (src/comm/workspace.h). Part of the
  /// communicator because send and recv are not collective and so could not allocate it.
  /// Throws Unsupported on a transport that has none (`nccl`: its collectives need none).
  Workspace& workspace() const;
  /// The same, nullptr without.
  Workspace* workspace_if_any() const { return workspace_.get(); }

 protected:
  Communicator(int rank, int size, double deadline_s)
      : rank_(rank), size_(size), deadline_s_(deadline_s) {}
  int rank_, size_;
  double deadline_s_;
  std::shared_ptr<Workspace> workspace_;
};

/// Process-wide. CPU ranks' waits call `check` on the waiting thread if they last: after a signal,
/// and ten times a second. What it throws, such as Interrupted, ends the wait and, as any error
/// inside a call does, the waits of the other ranks. nullptr: nothing is called.
void set_wait_check(void (*check)());

/// A link that the `threads` and `one_gpu` transports imitate: each rank's outgoing transfers share
/// `bytes_per_s`, and a transfer arrives `latency_s` after its last byte left. Transfers really
/// take that long and really run beside computation. `one_gpu` takes 1 MB/s to 10 TB/s and a
/// latency of at most 1 s.
struct EmulatedLink {
  double bytes_per_s = 0;
  double latency_s = 0;
  /// "1GB/s,20us" (units B/s kB/s MB/s GB/s or bit/s kbit/s Mbit/s Gbit/s; s ms us).
  /// Throws InvalidArgument with the expected form, or as `check`.
  static EmulatedLink parse(std::string_view text);
  /// Throws InvalidArgument unless the rate is 1 to 1e15 B/s and the latency 0 to 3600 s.
  void check() const;
  std::string describe() const;  ///< "emulated 1 GB/s 20 us"
};

struct WorldOptions {
  int ranks = 1;                       ///< threads only; a launcher fixes the count otherwise
  std::optional<EmulatedLink> link{};  ///< threads, and GPU ranks that share one GPU
  double deadline_s = 0;               ///< 0.001 to 1e9; 0: TANDEM_DEADLINE_S or 60
  int ranks_per_gpu = 1;               ///< GPU ranks only (run_gpus, World::of_gpus)
};

/// Runs `body` once on each of `options.ranks` threads. When one throws, the others are aborted,
/// and the first error (an original one before any Aborted) is rethrown here after all have ended.
/// Throws InvalidArgument for ranks < 1.
void run_threads(const WorldOptions& options, const std::function<void(Communicator&)>& body);

/// True in a process that mpirun (or srun with PMI) started.
bool launched_by_mpi();

/// Runs `body` on this process's rank of the MPI world. An error aborts the other ranks and is
/// rethrown. Throws Unsupported in a build without MPI, InvalidArgument when `options.ranks` is
/// neither 1 nor the world size, a link is given, or a world of this process is open.
void run_mpi(const WorldOptions& options, const std::function<void(Communicator&)>& body);

/// True in a process that is one rank of a world of several processes that a launcher started:
/// mpirun, or torchrun or srun without MPI. Throws InvalidArgument if torchrun's or srun's
/// variables are incomplete or out of range (src/comm/rendezvous/launch.h lists them).
bool launched();

/// Runs `body` on this process's rank of the world that torchrun or srun started. No MPI is used or
/// needed. The ranks meet at the first call, within the deadline. Ranks of several hosts need the
/// same secret (TANDEM_SECRET or TANDEM_SECRET_FILE). An error aborts the other ranks and is
/// rethrown. Throws Timeout, naming a rank that has not come; InvalidArgument if no such launcher
/// started this process, and as run_mpi does.
void run_processes(const WorldOptions& options, const std::function<void(Communicator&)>& body);

/// `run_mpi` under mpirun, `run_processes` under torchrun and srun, `run_threads` otherwise.
void run_world(const WorldOptions& options, const std::function<void(Communicator&)>& body);

}  // namespace tandem
TANDEM_API_END
