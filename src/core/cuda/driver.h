// Driver functions that the runtime lacks. Resolved at run time, so that programs of this build
// also start without a driver.
#pragma once

#include <cuda.h>

#include <string>

#include "core/cuda/check.h"
#include "tandem/error.h"

namespace tandem::gpu {

/// Throws Unsupported if this driver lacks the function. `version`: first CUDA version that has it
/// as declared here.
template <typename Function>
Function driver_function(const char* name, unsigned version = 12000) {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found{};
  check(cudaGetDriverEntryPointByVersion(name, &function, version, cudaEnableDefault, &found),
        name);
  if (found != cudaDriverEntryPointSuccess) {
    throw Unsupported(std::string(name) + ": this driver has none");
  }
  return reinterpret_cast<Function>(function);
}

/// Throws DeviceError unless `code`, returned by driver function `name`, is success.
inline void check_driver(CUresult code, const char* name) {
  if (code != CUDA_SUCCESS) {
    throw DeviceError(std::string(name) + ": error " + std::to_string(int(code)));
  }
}

}  // namespace tandem::gpu
