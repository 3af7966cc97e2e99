// Stands in for the nccl transport in a build without CUDA.
#include "tandem/cuda.h"

namespace tandem {

int gpu_count() {
  return 0;
}

void run_gpus(const WorldOptions&, const std::function<void(Communicator&)>&) {
  throw Unsupported("nccl transport: this build has no CUDA (configure with -DTANDEM_CUDA=ON)");
}

}  // namespace tandem
