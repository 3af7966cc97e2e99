// How a message's bytes are loaded.
#pragma once

#include <cuda_runtime.h>

namespace tandem::gpu {

/// In global memory, and maybe written by another GPU: not from this SM's cache.
struct FreshLoad {
  template <typename T>
  __device__ T operator()(const T* from) const {
    return __ldcg(from);
  }
};
/// In any memory, shared memory too, and written by this thread block or an earlier kernel.
struct AnyLoad {
  template <typename T>
  __device__ T operator()(const T* from) const {
    return *from;
  }
};

}  // namespace tandem::gpu
