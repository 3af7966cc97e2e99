// Load policies for a message's bytes.
#pragma once

#include <cuda_runtime.h>

namespace tandem::gpu {

/// Global memory that another GPU may have written: bypasses this SM's L1 cache.
struct FreshLoad {
  template <typename T>
  __device__ T operator()(const T* from) const {
    return __ldcg(from);
  }
};
/// Any memory, including shared, written by this thread block or an earlier kernel.
struct AnyLoad {
  template <typename T>
  __device__ T operator()(const T* from) const {
    return *from;
  }
};

}  // namespace tandem::gpu
