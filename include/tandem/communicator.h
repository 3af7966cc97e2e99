// Communicator: ranks, symmetric buffers and put-with-signal, the one primitive that everything is
// built on.
//
// Guarantees, on every transport:
//  - `put` is asynchronous: its source must stay unchanged until `flush` (or until the receiver's
//    answer proves delivery). Bytes become visible to the peer before the signal does.
//  - Puts from one rank to one peer become visible in the order they were issued.
//  - A signal is a 64-bit word that only grows: a put raises it to `epoch`, `wait` returns once it
//    is >= `epoch`. One writer per signal. Epochs are never reset, so reuse of a buffer needs no
//    barrier, only an epoch (or acknowledgement signal) that proves it was read.
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

/// Memory of the same size on every rank of a communicator, with `signals` signal words, all
/// zero-initialized. Created by Communicator::allocate; must not outlive its communicator. Ranks
/// may destroy theirs at any time and in any order: puts to a destroyed buffer are harmless.
/// `nccl`: memory is freed in the next `allocate` after all ranks have destroyed theirs
/// (constructing an operator allocates), or when the communicator is destroyed.
class SymmetricBuffer {
 public:
  virtual ~SymmetricBuffer() = default;
  std::byte* local() const { return local_; }
  size_t bytes() const { return bytes_; }
  int signals() const { return signals_; }
  /// Copy of `rank` if this rank's loads and stores reach it, else nullptr.
  virtual std::byte* peer(int rank) const = 0;

 protected:
  std::byte* local_ = nullptr;
  size_t bytes_ = 0;
  int signals_ = 0;
};

/// One rank's handle to a group of ranks. Calls on one Communicator must come from one thread at a
/// time, except `abort`, which any thread may call. All ranks must make collective calls (allocate,
/// split, exchange, barrier) in the same order.
class Communicator : public std::enable_shared_from_this<Communicator> {
 public:
  virtual ~Communicator() = default;
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  int rank() const { return rank_; }
  int size() const { return size_; }
  /// "threads", "mpi", "processes", "nccl" or "one_gpu".
  virtual std::string_view transport() const = 0;
  /// Whether the ranks are GPUs (tandem/cuda.h) and tensors are in device memory.
  virtual bool on_gpu() const { return false; }
  /// Physical link, as printed by benchmarks: "shm", "tcp", "emulated 1.0 GB/s 20 us".
  virtual std::string link() const = 0;

  /// Collective. Allocates a symmetric buffer. Throws Mismatch on every rank if `bytes` or
  /// `signals` differ. If a rank cannot allocate its memory, every rank throws IoError (`nccl`:
  /// DeviceError), which names that rank.
  virtual std::shared_ptr<SymmetricBuffer> allocate(size_t bytes, int signals) = 0;

  /// Copies source[0, bytes) to `offset` in `peer`'s copy of `buffer`, then raises the peer's
  /// `signal` to `epoch`. `bytes` may be 0 (signal only); `peer` may be this rank. GPU ranks put
  /// after the work enqueued on their stream. Throws InvalidArgument if peer, range or signal is
  /// out of bounds.
  virtual void put(int peer, SymmetricBuffer& buffer, size_t offset, const void* source,
                   size_t bytes, int signal, uint64_t epoch) = 0;
  /// Returns once the source of every earlier put may be overwritten.
  virtual void flush() = 0;
  /// Local value of `signal` (acquire).
  virtual uint64_t read_signal(const SymmetricBuffer& buffer, int signal) const = 0;
  /// Blocks until the local `signal` is >= `epoch`. Throws Timeout (after `deadline()`) or Aborted.
  virtual void wait(const SymmetricBuffer& buffer, int signal, uint64_t epoch,
                    const WaitSite& site) = 0;

  /// `wait`, but GPU ranks enqueue it on their stream (`stream_of`, tandem/cuda.h) and return:
  /// work enqueued later starts when the signal has come. If the deadline passes, that work starts
  /// nevertheless, and the next call that checks for it throws Timeout.
  virtual void enqueue_wait(const SymmetricBuffer& buffer, int signal, uint64_t epoch,
                            const WaitSite& site) {
    wait(buffer, signal, epoch, site);
  }

  /// Makes every rank's current and later waits throw Aborted, on this communicator and on all
  /// split from the same world. Not collective; callable from any thread. A wait for epoch 0, which
  /// does not block, throws too. `nccl`: the host notices an abort when it waits itself or for its
  /// stream through the communicator, and then ends the waits of its GPU.
  virtual void abort(const std::string& reason) = 0;
  /// Collective. Creates one communicator per distinct `color`, ranks ordered by (key, rank).
  virtual std::unique_ptr<Communicator> split(int color, int key) = 0;

  /// Collective. Gathers every rank's (small) blob, indexed by rank. Blobs may differ in length.
  virtual std::vector<std::vector<std::byte>> exchange(std::span<const std::byte> blob,
                                                       std::string_view what) = 0;
  /// Collective. Returns once every rank has entered. Throws Timeout, which names a missing rank.
  void barrier(std::string_view what = "barrier") { exchange({}, what); }
  /// Collective. Throws Mismatch on every rank, naming `what`, the two ranks and both values,
  /// unless all ranks pass the same `value`.
  void require_same(std::string_view what, std::string_view value);

  /// Max seconds of one wait. Default 60, or TANDEM_DEADLINE_S.
  double deadline() const { return deadline_s_; }
  /// Throws InvalidArgument unless `seconds` is 0.001 to 1e9.
  void set_deadline(double seconds);

  /// Bytes that this rank has sent in collectives and operators, without their arguments and
  /// signals. Its groups count for themselves. 0 for GPU ranks, where kernels send.
  uint64_t bytes_sent() const;

  /// Staging memory and epochs of the collectives (src/comm/workspace.h). Part of the communicator
  /// since send and recv are not collective and so could not allocate it. Throws Unsupported on a
  /// transport without one (`nccl`: its collectives need none).
  Workspace& workspace() const;
  /// Same as `workspace()`, but nullptr if there is none.
  Workspace* workspace_if_any() const { return workspace_.get(); }

 protected:
  Communicator(int rank, int size, double deadline_s)
      : rank_(rank), size_(size), deadline_s_(deadline_s) {}
  int rank_, size_;
  double deadline_s_;
  std::shared_ptr<Workspace> workspace_;
};

/// Process-wide. Waits of CPU ranks call `check` on the waiting thread if they last: after a
/// signal, and ten times a second. An exception from it, such as Interrupted, ends the wait and, as
/// any error inside a call does, the waits of the other ranks. nullptr: no check.
void set_wait_check(void (*check)());

/// Link emulated by the `threads` and `one_gpu` transports: the outgoing transfers of a rank share
/// `bytes_per_s`, and a transfer arrives `latency_s` after its last byte was sent. Transfers take
/// that time and overlap computation. `one_gpu` accepts 1 MB/s to 10 TB/s and a latency of at most
/// 1 s.
struct EmulatedLink {
  double bytes_per_s = 0;
  double latency_s = 0;
  /// Parses "1GB/s,20us" (units B/s kB/s MB/s GB/s or bit/s kbit/s Mbit/s Gbit/s; s ms us). Throws
  /// InvalidArgument with the expected form, or as `check`.
  static EmulatedLink parse(std::string_view text);
  /// Throws InvalidArgument unless the rate is 1 to 1e15 B/s and the latency 0 to 3600 s.
  void check() const;
  std::string describe() const;  ///< "emulated 1 GB/s 20 us"
};

struct WorldOptions {
  int ranks = 1;                       ///< threads only; otherwise the launcher sets the count
  std::optional<EmulatedLink> link{};  ///< threads, and GPU ranks that share one GPU
  double deadline_s = 0;               ///< 0.001 to 1e9; 0: TANDEM_DEADLINE_S or 60
  int ranks_per_gpu = 1;               ///< GPU ranks only (run_gpus, World::of_gpus)
};

/// Runs `body` on each of `options.ranks` threads. If one throws, the others are aborted, and after
/// all have ended the first error (an original error before any Aborted) is rethrown here. Throws
/// InvalidArgument for ranks < 1.
void run_threads(const WorldOptions& options, const std::function<void(Communicator&)>& body);

/// True in a process started by mpirun (or srun with PMI).
bool launched_by_mpi();

/// Runs `body` on this process's rank of the MPI world. An error aborts the other ranks and is
/// rethrown. Throws Unsupported in a build without MPI; InvalidArgument if `options.ranks` is
/// neither 1 nor the world size, a link is given, or a world of this process is open.
void run_mpi(const WorldOptions& options, const std::function<void(Communicator&)>& body);

/// True in a process that a launcher started as one rank of a multi-process world: mpirun, or
/// torchrun or srun without MPI. Throws InvalidArgument if torchrun's or srun's variables are
/// incomplete or out of range (list: src/comm/rendezvous/launch.h).
bool launched();

/// Runs `body` on this process's rank of the world started by torchrun or srun, without MPI. Ranks
/// rendezvous at the first call, within the deadline. Ranks on several hosts need the same secret
/// (TANDEM_SECRET or TANDEM_SECRET_FILE). An error aborts the other ranks and is rethrown. Throws
/// Timeout, which names a missing rank; InvalidArgument if no such launcher started this process,
/// and as run_mpi does.
void run_processes(const WorldOptions& options, const std::function<void(Communicator&)>& body);

/// Calls `run_mpi` under mpirun, `run_processes` under torchrun and srun, `run_threads` otherwise.
void run_world(const WorldOptions& options, const std::function<void(Communicator&)>& body);

}  // namespace tandem
TANDEM_API_END
