// Architecture of a GPU.
#pragma once

#include <string>

#include "core/cuda/check.h"

namespace tandem::gpu {

/// Name as compilers call it, such as sm_90. Throws DeviceError.
inline std::string architecture_of(int device) {
  int major = 0, minor = 0;
  check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device),
        "compute capability");
  check(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device),
        "compute capability");
  return "sm_" + std::to_string(major) + std::to_string(minor);
}

/// Kernels in folders sm90/ run on no other.
constexpr const char* kHopper = "sm_90";

}  // namespace tandem::gpu
