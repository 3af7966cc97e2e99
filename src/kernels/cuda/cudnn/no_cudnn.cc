// Stub of the plugin's loader for a build without cuDNN.
#include "kernels/cuda/cudnn/plugin_loader.h"

namespace tandem::gpu {

const CudnnPlugin& cudnn_plugin() {
  static const CudnnPlugin none{nullptr, "", "this build has no cuDNN"};
  return none;
}

}  // namespace tandem::gpu
