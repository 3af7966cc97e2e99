#include "core/cuda/stack.h"

#include "core/cuda/check.h"
#include "core/cuda/load_module.cuh"

namespace tandem::gpu {
namespace {

constexpr int kWords = 256;

// Indices known only at run time keep the words in memory.
__global__ void stack_kernel(int steps, unsigned* out) {
  unsigned words[kWords] = {};
  for (int i = 0; i < steps; ++i) words[unsigned(i) * 31 % kWords] += unsigned(i);
  if (out) *out = words[unsigned(steps) % kWords];
}

}  // namespace

void grow_stack(cudaStream_t stream) {
  stack_kernel<<<1, 1, 0, stream>>>(0, nullptr);
  check_launch("stack_kernel");
  check(cudaStreamSynchronize(stream), "stack_kernel");
}

}  // namespace tandem::gpu
