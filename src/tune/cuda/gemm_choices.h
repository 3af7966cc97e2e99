// cuBLASLt's algorithms are chosen by timing, and kept in the tuner's file: every run takes the
// ones of the first, and all ranks the same, as they decide on the bits of a result.
#pragma once

#include "comm/device/gpu_communicator.h"
#include "gemm/cuda/gemm_lt.h"

namespace tandem::gpu {

/// Collective, before products are made: every rank knows what rank 0's file has, once a
/// communicator.
void share_gemm_choices(GpuCommunicator& comm);

/// Collective, when an operator's products have been made and before they run: all ranks take what
/// the lowest of them has timed, and rank 0 keeps it.
void agree_on_gemm_choices(GpuCommunicator& comm, const LtContext& context);

}  // namespace tandem::gpu
