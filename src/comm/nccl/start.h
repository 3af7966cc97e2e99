// What has to be done before there are GPU ranks, for run_gpus and World alike: setting the
// variables that CUDA and NCCL read once, checking the options, and choosing each rank's GPU.
#pragma once

#include "tandem/communicator.h"

namespace tandem::gpu {

/// How many GPUs there are. Throws as run_gpus where there is none, and for options that no world
/// of GPU ranks has.
int require_gpus(const WorldOptions& options);
/// What NCCL_NVLS_ENABLE was before this library set it; nullptr: nothing.
const char* users_nvls();
/// Throws as run_gpus for ranks that cannot all share the first GPU.
void check_sharing(const WorldOptions& options);
/// Throws as run_gpus for more ranks of this process than GPUs.
void check_ranks(const WorldOptions& options, int gpus);
/// Makes the GPU of rank `rank`, number `local_rank` of its host, this thread's.
void use_gpu_of(int rank, int local_rank, int gpus);
/// Those of the ranks' control communicators, which have no link to emulate.
WorldOptions control_options(const WorldOptions& options);

}  // namespace tandem::gpu
