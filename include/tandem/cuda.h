// GPU ranks. A rank owns one GPU. Its Communicator ("nccl") allocates symmetric device memory and
// enqueues work on its stream without waiting for it.
//
// Operators, collectives and quantize_rows of a communicator run in call order. Order other
// accesses to their operands with the stream returned by stream_of, or with events between it and
// your stream; examples/gpu_ag_gemm.cc is a complete program. Ranks exist during a callback
// (run_gpus), or as long as a handle to them does (World::of_gpus in tandem/world.h). Functions
// that take a communicator throw InvalidArgument, which names its transport, unless it is of GPUs.
#pragma once

#include <functional>
#include <memory>

#include "tandem/communicator.h"
#include "tandem/error.h"
#include "tandem/export.h"
#include "tandem/tensor.h"

struct CUstream_st;  // CUDA's: cudaStream_t points to it

TANDEM_API_BEGIN
namespace tandem {

/// Number of GPUs this process can use; 0 in a build without CUDA and on a machine without a GPU.
int gpu_count();

/// Runs `body` once per rank, each on its own GPU: on `options.ranks` threads of this process, or
/// in the processes started by mpirun, torchrun or srun (one rank each; variables:
/// src/comm/rendezvous/launch.h). Errors as `run_world`. NVLink multicast stays off. Throws
/// Unsupported in a build without CUDA or without a GPU; InvalidArgument for more ranks than GPUs,
/// a link between several GPUs, or an NCCL_NVLS_ENABLE that asks for multicast. Variables set by
/// the user are kept, and a warning states the cost (src/comm/device/gpu_environment.h).
///
/// With `options.ranks_per_gpu` > 1 the ranks are threads that share the first GPU, each with its
/// own SMs (transport "one_gpu"): the same kernels, for tests and studies with fewer GPUs. NCCL is
/// not used. Times of such a world are no benchmark results. With `options.link`, all sends of a
/// rank are delayed as on a link of that rate and latency; candidates that cannot be delayed are
/// not used. Under a launcher the ranks are processes (transport "nccl", link "same-gpu"), at most
/// eight, whose work the GPU does in turns. Throws Unsupported if the driver cannot partition it.
void run_gpus(const WorldOptions& options, const std::function<void(Communicator&)>& body);

/// Makes the calling thread work for a rank of a World while the guard lives: the rank's GPU is
/// current, and allocations and launches use the rank's partition of it. Every call with the
/// communicator, or with objects created on it, needs one; guards may be nested. The destructor
/// restores the previous GPU. The body of run_gpus needs none.
class GpuGuard {
 public:
  /// Throws InvalidArgument unless `comm` is of GPUs, and DeviceError.
  explicit GpuGuard(Communicator& comm);
  ~GpuGuard();
  GpuGuard(const GpuGuard&) = delete;
  GpuGuard& operator=(const GpuGuard&) = delete;

 private:
  struct Inside;
  std::unique_ptr<Inside> inside_;
};

/// GPU of this rank, as in its tensors' `device`; current in the thread that runs `body`.
Device device_of(Communicator& comm);

/// Stream on which this rank's calls are enqueued: the communicator's own, not synchronized with
/// the default stream, unless another was set. Communicators made by `split` have their own
/// streams.
CUstream_st* stream_of(Communicator& comm);
/// Sets the stream of later calls. Earlier calls stay on their stream; neither later calls nor
/// `synchronize` wait for them. `stream` must be of this rank's GPU, and outlive the communicator
/// or be replaced before: run_gpus synchronizes once more after `body`. Throws InvalidArgument for
/// the default stream if ranks share a GPU, since they would share it.
void set_stream(Communicator& comm, CUstream_st* stream);

/// Blocks until all work enqueued on the stream has ended. Throws Timeout or Aborted if a call's
/// wait for a peer timed out (its results, and those of later calls, are then undefined). Throws
/// Timeout if the stream does not end within three deadlines; this one names no rank, as NCCL's own
/// kernels have no deadline. cudaStreamSynchronize reports none of this.
void synchronize(Communicator& comm);

}  // namespace tandem
TANDEM_API_END
