// Memory of GPUs, as core/memory.cc and core/exec.cc use it: core/cuda/device_memory.cc, or
// core/no_cuda.cc.
#pragma once

#include <cstddef>
#include <memory>

#include "core/exec.h"

namespace tandem {

/// Zero-initialized, from the calling thread's share of the GPU. Throws DeviceError, and
/// InvalidArgument if `device` is not that share's.
std::shared_ptr<std::byte> allocate_on_gpu(size_t bytes, Device device);
/// Copies between any two memories on exec's stream and waits for it.
void copy_bytes(const Exec& exec, const void* from, void* to, size_t bytes);
void wait_for_stream(const Exec& exec);
/// Enqueues zeros.
void clear_bytes(const Exec& exec, void* memory, size_t bytes);

}  // namespace tandem
