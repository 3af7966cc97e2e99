// GPU ranks that live as long as their handles.
#include <exception>
#include <memory>
#include <utility>

#include "comm/nccl/nccl_communicator.h"
#include "comm/nccl/start.h"
#include "comm/one_gpu/one_gpu_communicator.h"
#include "comm/rendezvous/launch.h"
#include "comm/threads/make_ranks.h"
#include "comm/world/new_worlds.h"
#include "comm/world/world_state.h"
#include "core/cuda/current_device.h"

namespace tandem {
namespace {

// Rank of a process that has only one.
Communicators one_rank(std::shared_ptr<Communicator> control, int gpus) {
  const gpu::CurrentDevice unchanged;
  const auto world = std::make_shared<WorldState>(Communicators{control});
  try {
    gpu::use_gpu_of(control->rank(), local_rank(control->rank()), gpus);
    return {std::make_shared<gpu::NcclCommunicator>(*control, world)};
  } catch (const std::exception& error) {
    control->abort(error.what());
    throw;
  }
}

// Ranks that each have a share of the first GPU.
Communicators sharing_ranks(const WorldOptions& options) {
  gpu::check_sharing(options);
  const Communicators controls = new_thread_ranks(gpu::control_options(options));
  const auto state = std::make_shared<WorldState>(controls);
  const auto world = std::make_shared<gpu::OneGpuWorld>(options.link);
  return threads::make_ranks(controls, [&](int rank) -> std::shared_ptr<Communicator> {
    gpu::check(cudaSetDevice(0), "cudaSetDevice");
    const gpu::UseShare share(gpu::GpuShare::share_of(0, options.ranks_per_gpu, rank));
    return std::make_shared<gpu::OneGpuCommunicator>(*controls[size_t(rank)], world,
                                                     rank / gpu::kMaxGpus, nullptr, state);
  });
}

}  // namespace

Communicators new_gpu_ranks(const WorldOptions& options) {
  const int gpus = gpu::require_gpus(options);
  if (options.ranks_per_gpu != 1) return sharing_ranks(options);
  if (launched_by_mpi()) return one_rank(new_mpi_rank(options).front(), gpus);
  require_mpi_under_mpirun();
  if (launched()) return one_rank(new_process_rank(options).front(), gpus);
  gpu::check_ranks(options, gpus);
  const Communicators controls = new_thread_ranks(options);
  const auto world = std::make_shared<WorldState>(controls);
  return threads::make_ranks(controls, [&](int rank) -> std::shared_ptr<Communicator> {
    gpu::use_gpu_of(rank, rank, gpus);
    return std::make_shared<gpu::NcclCommunicator>(*controls[size_t(rank)], world);
  });
}

}  // namespace tandem
