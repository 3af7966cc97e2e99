// Functions of the driver that the runtime does not have. They are found at run time: programs of
// this build also start where there is no driver.
#pragma once

#include <cuda.h>

#include <string>

#include "core/cuda/check.h"
#include "tandem/error.h"

namespace tandem::gpu {

/// Throws Unsupported where this driver has no such function. `version`: the first of CUDA that has
/// it as it is declared here.
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

/// Throws DeviceError unless `code`, of the driver's function `name`, is success.
inline void check_driver(CUresult code, const char* name) {
  if (code != CUDA_SUCCESS) {
    throw DeviceError(std::string(name) + ": error " + std::to_string(int(code)));
  }
}

}  // namespace tandem::gpu
