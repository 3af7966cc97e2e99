// World: ranks that live as long as their handles, for servers, tests and language bindings; ranks
// of run_world end with a callback.
//
// A world ends when the World and all objects made in it are gone, in any order: communicators
// share ownership of it, operators share ownership of their communicator. Ranks may release theirs
// at different times.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "tandem/communicator.h"
#include "tandem/export.h"

struct ncclComm;     // NCCL's: ncclComm_t points to it
struct CUstream_st;  // CUDA's: cudaStream_t points to it

TANDEM_API_BEGIN
namespace tandem {

/// Under a launcher (`launched`): this process's one rank of the world; else `options.ranks` ranks
/// of this process, each used by one thread at a time.
class World {
 public:
  /// CPU ranks. Collective under a launcher. Throws as run_world does, and InvalidArgument if a
  /// world of processes is already open in this process: use `split` for smaller ones.
  explicit World(const WorldOptions& options = {});
  /// Ranks of this process, even under a launcher.
  static World of_threads(const WorldOptions& options);
  /// Collective. World over the ranks of the caller's MPI communicator, in its order.
  /// `communicator` is the result of MPI_Comm_c2f (mpi4py: comm.py2f()); it may be freed
  /// afterwards. The first call fixes this process's ranks: later ones, and run_mpi, must have the
  /// same.
  ///
  /// The caller initializes MPI with MPI_THREAD_MULTIPLE, and finalizes it after the world is gone.
  /// Throws InvalidArgument for a handle that is no intra-communicator, or with the other
  /// requirement that is not met; Unsupported in a build without MPI.
  static World adopt_mpi(int communicator, const WorldOptions& options = {});
  /// GPU ranks: one per GPU, or ranks of this process that share the first GPU
  /// (`options.ranks_per_gpu`). Collective under a launcher. A rank must be used within a GpuGuard
  /// (tandem/cuda.h), on any thread; its destruction needs none. Throws as run_gpus.
  ///
  /// Destruction of a communicator waits until its enqueued calls have ended, at most as long as
  /// `synchronize`. Under a launcher, destruction of the process's last one also waits for the
  /// other processes, for one deadline at most. Until then NCCL keeps its memory for communicators
  /// that were split off. If ranks share a GPU, buffers that no `allocate` has freed keep their
  /// memory until the world ends.
  static World of_gpus(const WorldOptions& options = {});
  /// Collective. GPU ranks over the ranks of the caller's ncclComm_t, in its order. Ranks that are
  /// threads of one process each call this on their own thread and get a World each. `stream` is a
  /// cudaStream_t of this rank's GPU, which must be current: calls are enqueued on it, as after
  /// set_stream (tandem/cuda.h).
  ///
  /// The caller's communicator serves only for the rendezvous and stays the caller's: it may be
  /// destroyed once this returns. The world creates its own in addition, with NCCL's settings of
  /// the environment, but without those of the caller's ncclConfig_t. While both exist, NCCL has
  /// buffers on the GPU for each. Otherwise as of_gpus.
  ///
  /// Throws InvalidArgument for a null communicator, or one in an error state, before anything is
  /// sent; the other ranks then throw Timeout, and the caller should abort the communicator. Throws
  /// on every rank, naming the failing one: InvalidArgument if the current device or the stream's
  /// is not the communicator's, if the stream is being captured, for options with a link, another
  /// rank count or ranks that share a GPU, and if NCCL may use NVLink multicast (the GPU has it,
  /// and NCCL_NVLS_ENABLE was not 0 before); Unsupported for more than 8 ranks of a node. Throws
  /// Unsupported in a build without CUDA or without a GPU.
  static World adopt_nccl(ncclComm* communicator, CUstream_st* stream,
                          const WorldOptions& options = {});

  /// Gathers bytes over the ranks of a caller's group: those of every rank, concatenated in rank
  /// order. Collective; all ranks pass the same number of bytes. An exception leaves the function
  /// that called it.
  using Gather = std::function<std::vector<std::byte>(std::span<const std::byte> local)>;
  /// Collective. World of CPU ranks that no launcher connects, such as the members of another
  /// library's process group, which need not be all processes. `gather` serves only for the
  /// rendezvous. A process may open any number of such worlds, and several at once.
  ///
  /// Throws InvalidArgument on every rank, naming the failing one, if `rank` is not in [0, size) or
  /// for options with a link or another rank count; Mismatch if ranks run different builds; Timeout
  /// naming a rank that has not connected within the deadline.
  static World connect(int rank, int size, const Gather& gather, const WorldOptions& options = {});
  /// Collective. Same as `connect`, but GPU ranks: the GPU that is current, with calls enqueued on
  /// `stream`. Otherwise as adopt_nccl.
  static World connect_gpus(int rank, int size, const Gather& gather, CUstream_st* stream,
                            const WorldOptions& options = {});

  World(World&&) noexcept = default;
  World& operator=(World&&) noexcept = default;
  /// During stack unwinding by an exception, the waits of all ranks end with Aborted.
  ~World();

  int size() const { return size_; }
  /// Ranks of this process: one among several processes, or all.
  const std::vector<int>& ranks() const { return ranks_; }
  /// Throws InvalidArgument for a rank of another process.
  std::shared_ptr<Communicator> communicator(int rank) const;
  /// This process's only rank. Throws InvalidArgument if there are several.
  std::shared_ptr<Communicator> communicator() const;
  /// Makes every rank's current and later waits throw Aborted. Callable from any thread.
  void abort(const std::string& reason) const;

 private:
  World(std::vector<std::shared_ptr<Communicator>> communicators, int errors);

  int size_ = 0;
  std::vector<int> ranks_;
  std::vector<std::shared_ptr<Communicator>> communicators_;
  int errors_ = 0;  ///< uncaught exceptions at construction
};

}  // namespace tandem
TANDEM_API_END
