// Agreement on cuBLASLt algorithms. They are chosen by timing and saved in the tuner's file: every
// run uses those of the first, and all ranks the same, as they determine the bits of a result.
#pragma once

#include "comm/device/gpu_communicator.h"
#include "gemm/cuda/gemm_lt.h"

namespace tandem::gpu {

/// Collective, before GEMMs are created: gives every rank the choices in rank 0's file, once per
/// communicator.
void share_gemm_choices(GpuCommunicator& comm);

/// Collective, after an operator's GEMMs have been created and before they run: for each GEMM all
/// ranks adopt the choice of the lowest rank that timed it, and rank 0 saves it.
void agree_on_gemm_choices(GpuCommunicator& comm, const LtContext& context);

}  // namespace tandem::gpu
