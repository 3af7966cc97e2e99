// Scoped change of CUDA's current device, which is per thread.
#pragma once

#include <cuda_runtime_api.h>

namespace tandem::gpu {

/// Makes `device` current in this thread while it lives, then restores the previous one. Does not
/// throw, so usable in destructors.
class CurrentDevice {
 public:
  CurrentDevice() { known_ = cudaGetDevice(&before_) == cudaSuccess; }
  explicit CurrentDevice(int device) : CurrentDevice() { cudaSetDevice(device); }
  ~CurrentDevice() {
    if (known_) cudaSetDevice(before_);
  }
  CurrentDevice(const CurrentDevice&) = delete;
  CurrentDevice& operator=(const CurrentDevice&) = delete;

 private:
  int before_ = 0;
  bool known_ = false;
};

}  // namespace tandem::gpu
