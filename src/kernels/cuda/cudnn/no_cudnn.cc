// Stub of the plugin's loader for a build without cuDNN.
#include "kernels/cuda/cudnn/plugin_loader.h"

namespace tandem::gpu {

const CudnnPlugin& cudnn_plugin() {
  static const std::string missing = TANDEM_CUDNN_MISSING;
  static const CudnnPlugin none{
      nullptr, "",
      "this build has no cuDNN" +
          (missing.empty() ? "" : " (not found: " + missing + "; tools/setup_cuda.sh)")};
  return none;
}

}  // namespace tandem::gpu
