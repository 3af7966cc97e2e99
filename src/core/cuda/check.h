// CUDA's error codes as typed errors.
#pragma once

#include <cuda_runtime_api.h>

#include <string>

#include "tandem/error.h"

namespace tandem::gpu {

/// Throws DeviceError "what: name (text)" unless `code` is success.
inline void check(cudaError_t code, const char* what) {
  if (code == cudaSuccess) return;
  cudaGetLastError();  // else the next launch would be blamed for it
  throw DeviceError(std::string(what) + ": " + cudaGetErrorName(code) + " (" +
                    cudaGetErrorString(code) + ")");
}

/// After a kernel launch.
inline void check_launch(const char* kernel) {
  check(cudaGetLastError(), kernel);
}

}  // namespace tandem::gpu
