// Eager loading of kernels. With CUDA's lazy loading, the first launch of a kernel loads it, which
// waits for all work on the GPU; a wait for a peer whose thread is also loading would then last
// until the deadline. Each source file's kernels are one module.
#pragma once

#include <cuda.h>

#include <functional>

namespace tandem::gpu {

/// Registers the module that contains `kernel`. Constructed by core/cuda/load_module.cuh before
/// main.
class KnownModule {
 public:
  explicit KnownModule(const void* kernel);
};

/// Calls `visit` for all kernels of all Tandem modules for the current device's architecture.
/// Throws Unsupported if the driver cannot enumerate them.
void for_each_kernel(const std::function<void(CUfunction)>& visit);

/// Loads all kernels of all Tandem modules onto the current device, once per process, except those
/// for other architectures. A driver limitation is reported once.
void load_modules();

}  // namespace tandem::gpu
