#include <cuda_runtime_api.h>

#include <memory>

#include "comm/nccl/nccl_communicator.h"
#include "comm/nccl/start.h"
#include "comm/one_gpu/one_gpu_communicator.h"
#include "comm/rendezvous/launch.h"
#include "comm/world/new_worlds.h"
#include "core/cuda/current_device.h"
#include "tandem/cuda.h"

namespace tandem {
namespace {

// Runs all ranks as threads of this process, each with its share of the first GPU.
void share_gpu(const WorldOptions& options, const std::function<void(Communicator&)>& body) {
  gpu::check_sharing(options);
  // Lives until all threads have ended.
  const auto world = std::make_shared<gpu::OneGpuWorld>(options.link);
  run_threads(gpu::control_options(options), [&](Communicator& control) {
    gpu::check(cudaSetDevice(0), "cudaSetDevice");
    const gpu::UseShare share(gpu::GpuShare::share_of(0, options.ranks_per_gpu, control.rank()));
    gpu::OneGpuCommunicator comm(control, world, control.rank() / gpu::kMaxGpus);
    body(comm);
    comm.synchronize();
  });
}

}  // namespace

void run_gpus(const WorldOptions& options, const std::function<void(Communicator&)>& body) {
  const int gpus = gpu::require_gpus(options);
  const bool shares = options.ranks_per_gpu != 1;
  const auto on_device = [&](Communicator& control, int local_rank) {
    shares ? gpu::share_with_processes(options, control.size())
           : gpu::use_gpu_of(control.rank(), local_rank, gpus);
    gpu::NcclCommunicator comm(control, nullptr, shares);
    body(comm);
    comm.synchronize();
  };
  const auto on_launched = [&](Communicator& c) { on_device(c, local_rank(c.rank())); };
  if (launched_by_mpi()) return run_mpi(options, on_launched);
  require_mpi_under_mpirun();
  if (launched()) return run_processes(options, on_launched);
  if (shares) return share_gpu(options, body);
  gpu::check_ranks(options, gpus);
  run_threads(options, [&](Communicator& c) { on_device(c, c.rank()); });
}

}  // namespace tandem
