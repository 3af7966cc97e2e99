// GPU ranks. A rank owns one GPU. Its Communicator ("nccl") hands out symmetric device memory, and
// work is enqueued on the communicator's stream without waiting for it.
//
// Operators, collectives and quantize_rows of a communicator run in the order of the calls. Order
// other accesses to their operands by the stream that stream_of gives, or by events between it and
// a stream of yours; examples/gpu_ag_gemm.cc is a whole program. Ranks last for a callback
// (run_gpus), or as long as somebody holds them (World::of_gpus in tandem/world.h). Functions that
// take a communicator throw InvalidArgument, which names its transport, unless it is of GPUs.
#pragma once

#include <functional>
#include <memory>

#include "tandem/communicator.h"
#include "tandem/error.h"
#include "tandem/export.h"
#include "tandem/tensor.h"

struct CUstream_st;  // CUDA's: a cudaStream_t points to one

TANDEM_API_BEGIN
namespace tandem {

/// GPUs this process can use; 0 in a build without CUDA and on a machine without one.
int gpu_count();

/// Runs `body` once per rank, each on a GPU of its own: on `options.ranks` threads of this
/// process, or in the processes that mpirun, torchrun or srun started (one rank each;
/// src/comm/rendezvous/launch.h has the variables). Errors as `run_world`. NVLink multicast stays
/// off. Throws Unsupported in a build without CUDA or without a GPU; InvalidArgument for more
/// ranks than GPUs, a link between several GPUs, or an NCCL_NVLS_ENABLE that asks for multicast.
/// Variables that the user has set are kept, and a warning says what that costs
/// (src/comm/device/gpu_environment.h).
///
/// With `options.ranks_per_gpu` above 1 the ranks are threads that share the first GPU, each with
/// SMs of its own (transport "one_gpu"): the same kernels, to test and study them with fewer GPUs.
/// NCCL takes no part. Times of such a world are no results. With `options.link`, whatever a rank
/// sends is delayed as on a link of that rate and latency; candidates that cannot be delayed are
/// left out. Throws Unsupported under a launcher, and if the driver cannot split the GPU.
void run_gpus(const WorldOptions& options, const std::function<void(Communicator&)>& body);

/// For ranks of a World: while it lives, its thread works for the rank. The rank's GPU is current,
/// and what is made or enqueued has the rank's part of that GPU. Make every call with the
/// communicator, or with what was made on it, within one; they may be nested. Afterwards the GPU
/// from before is current again. The body of run_gpus needs none.
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

/// This rank's GPU, as in its tensors' `device`. It is current in `body`'s thread.
Device device_of(Communicator& comm);

/// The stream on which this rank's calls are enqueued: its own, which does not wait for the default
/// stream, unless another was set. Communicators that `split` makes have their own, too.
CUstream_st* stream_of(Communicator& comm);
/// Sets the stream of later calls. Earlier ones stay where they are, and neither later calls nor
/// `synchronize` wait for them. `stream` is of this rank's GPU. It must outlive the communicator,
/// or be replaced before: run_gpus synchronizes once more behind `body`. Throws InvalidArgument for
/// the default stream if ranks share a GPU: all of them would have the same.
void set_stream(Communicator& comm, CUstream_st* stream);

/// Blocks until everything enqueued on the stream has ended. Throws Timeout or Aborted if a call's
/// wait for a peer gave up (its results, and those of calls behind it, are then undefined). Throws
/// Timeout if the stream does not end within three deadlines; it cannot say who is missing, as
/// NCCL's own kernels know no deadline. cudaStreamSynchronize reports none of this.
void synchronize(Communicator& comm);

}  // namespace tandem
TANDEM_API_END
