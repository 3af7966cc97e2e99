// Whether a rank can take part in a world that is made of the caller's ncclComm_t. Calls neither
// CUDA nor NCCL, so it is tested without a GPU.
#pragma once

#include <string>

#include "comm/device/gpu_environment.h"
#include "tandem/communicator.h"

namespace tandem {

struct AdoptedNccl {
  int size = 1, device = 0;  ///< the communicator's
  int current_device = 0;    ///< the thread's
  int stream_device = 0;
  bool captured = false;   ///< the stream is, or cannot be asked
  bool multicast = false;  ///< this GPU can: NCCL uses it unless it is told not to
};

/// Why not: the thing, its value and what was expected. Empty if it can. `users_nvls`: what
/// NCCL_NVLS_ENABLE was before this library set it, nullptr for nothing. NCCL has read it by then.
std::string refusal_of(const AdoptedNccl& adopted, const WorldOptions& options,
                       const char* users_nvls);

}  // namespace tandem
