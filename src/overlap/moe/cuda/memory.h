// Device memory of an MoE layer.
#pragma once

#include <cstdint>

#include "core/cuda/handles.h"

namespace tandem::gpu {

inline DeviceMemory ints(int64_t count) {
  return DeviceMemory(size_t(count) * sizeof(int32_t));
}
inline int32_t* ints(const DeviceMemory& memory) {
  return reinterpret_cast<int32_t*>(memory.data());
}

inline uint32_t* uints(const DeviceMemory& memory) {
  return reinterpret_cast<uint32_t*>(memory.data());
}

inline DeviceMemory floats(int64_t count) {
  return DeviceMemory(size_t(count) * sizeof(float));
}
inline float* floats(const DeviceMemory& memory) {
  return reinterpret_cast<float*>(memory.data());
}

/// [rows, columns] of bf16 or f16.
inline DeviceMemory values(int64_t rows, int64_t columns) {
  return DeviceMemory(size_t(rows * columns) * 2);
}

}  // namespace tandem::gpu
