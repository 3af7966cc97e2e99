// Kernels are loaded before they are needed. Where CUDA loads lazily, a kernel's first launch loads
// it, which waits for all that runs on the GPU; a wait for a peer whose thread is just loading,
// too, would then last until the deadline. A source file's kernels are one module.
#pragma once

#include <cuda.h>

#include <functional>

namespace tandem::gpu {

/// Remembers the module that `kernel` is in. Made by core/cuda/load_module.cuh before main.
class KnownModule {
 public:
  explicit KnownModule(const void* kernel);
};

/// `visit` for all kernels of all modules of Tandem's that are for the current device's
/// architecture. Throws Unsupported where the driver cannot enumerate them.
void for_each_kernel(const std::function<void(CUfunction)>& visit);

/// Loads all kernels of all modules of Tandem's onto the current device, once in a process. Those
/// for another architecture are left out. What this driver cannot do is said once.
void load_modules();

}  // namespace tandem::gpu
