// Loads tandem_cudnn.so, and with it cuDNN.
#pragma once

#include <string>

#include "kernels/cuda/cudnn/plugin.h"

namespace tandem::gpu {

struct CudnnPlugin {
  const TandemCudnn* functions = nullptr;
  std::string version;  ///< of the cuDNN that was loaded
  std::string absent;   ///< reason why there are no functions
};

/// Opened by the first call of the process and never closed. Searched in the folder of the library
/// or the program, in ../lib of it, then below the prefix the build was configured with.
const CudnnPlugin& cudnn_plugin();

}  // namespace tandem::gpu
