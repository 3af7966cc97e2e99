// Setup before GPU ranks exist, for run_gpus and World alike: sets the variables that CUDA and NCCL
// read once, checks the options and chooses each rank's GPU.
#pragma once

#include "tandem/communicator.h"

namespace tandem::gpu {

/// Number of GPUs. Throws as run_gpus if there is none, and for options that no world of GPU ranks
/// supports.
int require_gpus(const WorldOptions& options);
/// NCCL_NVLS_ENABLE before this library set it; nullptr if unset.
const char* users_nvls();
/// Throws as run_gpus for ranks that cannot all share the first GPU.
void check_sharing(const WorldOptions& options);
/// Throws as run_gpus for `ranks` processes that cannot all share the first GPU. Makes NCCL take
/// this process for a node, before NCCL's first call.
void share_with_processes(const WorldOptions& options, int ranks);
/// Throws as run_gpus for more ranks of this process than GPUs.
void check_ranks(const WorldOptions& options, int gpus);
/// Selects for this thread the GPU of rank `rank`, which is number `local_rank` on its host.
void use_gpu_of(int rank, int local_rank, int gpus);
/// Options of the ranks' control communicators, which have no emulated link.
WorldOptions control_options(const WorldOptions& options);

}  // namespace tandem::gpu
