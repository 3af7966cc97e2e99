// Copies by thread blocks of the pair kernels, for elements of two or four bytes.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "codec/cuda/loads.cuh"
#include "collectives/cuda/encoded_pairs.h"

namespace tandem::gpu {

/// Copies by thread block `block` of `blocks`: 16 bytes at a time if both addresses are aligned,
/// with kAtOnce vectors loaded by a thread before it stores them.
template <int kAtOnce, typename Load = FreshLoad>
__device__ void copy_bytes(const std::byte* from, std::byte* to, int64_t bytes, int block = 0,
                           int blocks = 1) {
  const bool wide = (reinterpret_cast<uintptr_t>(from) | reinterpret_cast<uintptr_t>(to)) % 16 == 0;
  const int64_t vecs = wide ? bytes / 16 : 0;
  const auto* const source = reinterpret_cast<const uint4*>(from);
  auto* const target = reinterpret_cast<uint4*>(to);
  for (int64_t first = int64_t(block) * kAtOnce * kPairThreads + threadIdx.x; first < vecs;
       first += int64_t(blocks) * kAtOnce * kPairThreads) {
    uint4 words[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (first + i * kPairThreads < vecs) words[i] = Load()(source + first + i * kPairThreads);
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (first + i * kPairThreads < vecs) target[first + i * kPairThreads] = words[i];
    }
  }
  const int64_t step = int64_t(blocks) * kPairThreads;
  for (int64_t i = 8 * vecs + block * kPairThreads + int(threadIdx.x); i < bytes / 2; i += step) {
    reinterpret_cast<uint16_t*>(to)[i] = Load()(reinterpret_cast<const uint16_t*>(from) + i);
  }
}

/// Copies this rank's rows to itself in the thread blocks after the first `exchanging`, which
/// exchange with peers; the copying blocks use the remaining SM capacity. True if this block is one
/// of them.
__device__ inline bool copies_local(const EncodedPair& local, int64_t size, int exchanging) {
  const int block = int(blockIdx.x) - exchanging;
  if (block < 0) return false;
  copy_bytes<kCopyVectorsAtOnce>(local.send, local.recv, local.send_elements * size, block,
                                 int(gridDim.x) - exchanging);
  return true;
}

}  // namespace tandem::gpu
