// World: ranks that live as long as their handles do, beside run_world, whose ranks end with a
// callback. What a server, a test or another language needs.
//
// A world ends when the World and everything made in it are gone, in any order: its communicators
// hold it, operators hold the communicator that they were constructed with. Ranks may let go at
// different times, too.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "tandem/communicator.h"
#include "tandem/export.h"

struct ncclComm;     // NCCL's: an ncclComm_t points to one
struct CUstream_st;  // CUDA's: a cudaStream_t points to one

TANDEM_API_BEGIN
namespace tandem {

/// Under a launcher (`launched`) this process's one rank of all, else `options.ranks` ranks of this
/// process, each to be used by one thread at a time.
class World {
 public:
  /// CPU ranks.
  /// Collective under a launcher. Throws as run_world does, and InvalidArgument where a world of
  /// processes is open in this process already: `split` makes smaller ones.
  explicit World(const WorldOptions& options = {});
  /// Ranks of this process, under a launcher too.
  static World of_threads(const WorldOptions& options);
  /// Collective: the ranks of a communicator that the caller has, in its order. `communicator` is
  /// what MPI_Comm_c2f gives (mpi4py: comm.py2f()); it may be freed afterwards. The first call
  /// fixes this process's ranks: later ones, and run_mpi, must have the same.
  ///
  /// The caller has initialised MPI with MPI_THREAD_MULTIPLE, and finalises it after the world is
  /// gone. Throws InvalidArgument for a handle that is no intra-communicator, or which names what
  /// else is wrong; Unsupported in a build without MPI.
  static World adopt_mpi(int communicator, const WorldOptions& options = {});
  /// GPU ranks: one a GPU, or ranks of this process that share the first one
  /// (`options.ranks_per_gpu`). Collective under a launcher. A rank is used within a GpuGuard
  /// (tandem/cuda.h), on any thread; its destruction needs none. Throws as run_gpus.
  ///
  /// The destruction of a communicator waits until the calls that it has enqueued have ended, at
  /// most as long as `synchronize`. Under a launcher, that of the process's last one also waits for
  /// the other processes, for one deadline at most. Until then NCCL keeps its memory for parts that
  /// were split off. If ranks share a GPU, buffers that no `allocate` has freed keep their memory
  /// as long as the world lasts.
  static World of_gpus(const WorldOptions& options = {});
  /// Collective: GPU ranks, those of an ncclComm_t that the caller has, in its order. Ranks that
  /// are threads of one process each call it, on threads of their own, and get a World each.
  /// `stream` is a cudaStream_t of this rank's GPU, which is current: calls are enqueued on it, as
  /// after set_stream (tandem/cuda.h).
  ///
  /// The communicator introduces the ranks to each other, and remains the caller's: it can be
  /// destroyed as soon as this has returned. The world has one of its own beside it, with NCCL's
  /// settings of the environment, but without those of the caller's ncclConfig_t. While both
  /// exist, NCCL has buffers on the GPU for each. For the rest as of_gpus.
  ///
  /// Throws InvalidArgument for a null communicator, or one in a state of error, before anything is
  /// sent; the other ranks throw Timeout then, and the caller is to abort the communicator. Throws
  /// on every rank, naming the one: InvalidArgument if the current device or the stream's is not
  /// the communicator's, if the stream is captured, for options with a link, with another count of
  /// ranks or with ranks that share a GPU, and if NCCL may use NVLink multicast (the GPU has it,
  /// and NCCL_NVLS_ENABLE was not 0 before); Unsupported for more than 8 ranks of a node. Throws
  /// Unsupported in a build without CUDA or without a GPU.
  static World adopt_nccl(ncclComm* communicator, CUstream_st* stream,
                          const WorldOptions& options = {});

  World(World&&) noexcept = default;
  World& operator=(World&&) noexcept = default;
  /// If an exception is on its way, the waits of all ranks end with Aborted.
  ~World();

  int size() const { return size_; }
  /// The ranks that this process holds: its own one among several processes, or all.
  const std::vector<int>& ranks() const { return ranks_; }
  /// Throws InvalidArgument for a rank that this process does not hold.
  std::shared_ptr<Communicator> communicator(int rank) const;
  /// This process's only one. Throws InvalidArgument where it holds several.
  std::shared_ptr<Communicator> communicator() const;
  /// Ends every rank's current and later waits with Aborted. Any thread.
  void abort(const std::string& reason) const;

 private:
  World(std::vector<std::shared_ptr<Communicator>> communicators, int errors);

  int size_ = 0;
  std::vector<int> ranks_;
  std::vector<std::shared_ptr<Communicator>> communicators_;
  int errors_ = 0;  ///< on their way when this was made
};

}  // namespace tandem
TANDEM_API_END
