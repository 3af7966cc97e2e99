// Check whether a rank can join a world made of the caller's ncclComm_t. Calls neither CUDA nor
// NCCL, so it is tested without a GPU.
#pragma once

#include <string>

#include "comm/device/gpu_environment.h"
#include "tandem/communicator.h"

namespace tandem {

struct AdoptedNccl {
  int size = 1, device = 0;  ///< the communicator's
  int current_device = 0;    ///< the calling thread's
  int stream_device = 0;
  bool captured = false;   ///< the stream is being captured, or its state is unknown
  bool multicast = false;  ///< supported by this GPU: NCCL uses it unless disabled
};

/// Reason it cannot: the setting, its value and what was expected; empty if it can. `users_nvls`:
/// NCCL_NVLS_ENABLE before this library set it, nullptr if unset. NCCL has read it by then.
std::string refusal_of(const AdoptedNccl& adopted, const WorldOptions& options,
                       const char* users_nvls);

}  // namespace tandem
