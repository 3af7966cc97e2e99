// Tables computed on the host, in device memory.
#pragma once

#include <vector>

#include "core/cuda/handles.h"

namespace tandem::gpu {

/// Copies `bytes` from any host memory. Blocks until the copy is done, and waits for no kernel.
/// Throws DeviceError.
DeviceMemory uploaded(const void* host, size_t bytes);

template <typename T>
DeviceMemory uploaded(const std::vector<T>& table) {
  return uploaded(table.data(), table.size() * sizeof(T));
}

}  // namespace tandem::gpu
