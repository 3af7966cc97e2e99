#include "collectives/cuda/encoded_kernels.cuh"
#include "core/cuda/load_module.cuh"

namespace tandem::gpu {

EncodedKernel integer_kernel(const Wire& wire, EncodedOp op) {
  return encoded_kernel(
      wire, op, []<typename Format>(Format) { return !IsSmallFloat<Format> && !IsLevels<Format>; });
}

}  // namespace tandem::gpu
