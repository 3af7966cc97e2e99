// Conversion of CUDA's error codes to typed errors.
#pragma once

#include <cuda_runtime_api.h>

#include <string>

#include "tandem/error.h"

namespace tandem::gpu {

/// Throws DeviceError "what: name (text)" unless `code` is success.
inline void check(cudaError_t code, const char* what) {
  if (code == cudaSuccess) return;
  cudaGetLastError();  // clears it, or the next launch would report it
  throw DeviceError(std::string(what) + ": " + cudaGetErrorName(code) + " (" +
                    cudaGetErrorString(code) + ")");
}

/// Checks the kernel launch just made.
inline void check_launch(const char* kernel) {
  check(cudaGetLastError(), kernel);
}

}  // namespace tandem::gpu
