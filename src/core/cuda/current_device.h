// CUDA's current device is the thread's.
#pragma once

#include <cuda_runtime_api.h>

namespace tandem::gpu {

/// While it lives `device` is current in this thread, afterwards the one from before. Does not
/// throw: in destructors, too.
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
