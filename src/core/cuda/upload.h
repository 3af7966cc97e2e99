// Tables that the host computes, in device memory.
#pragma once

#include <vector>

#include "core/cuda/handles.h"

namespace tandem::gpu {

/// `bytes` from any memory of the host. Blocks until they are there, and waits for no kernel.
/// Throws DeviceError.
DeviceMemory uploaded(const void* host, size_t bytes);

template <typename T>
DeviceMemory uploaded(const std::vector<T>& table) {
  return uploaded(table.data(), table.size() * sizeof(T));
}

}  // namespace tandem::gpu
