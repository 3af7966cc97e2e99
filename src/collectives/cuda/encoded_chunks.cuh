// A chunk of a message between two ranks, encoded and decoded by a thread block: an independent
// message of whole blocks, so decoded values do not depend on the chunk size.
#pragma once

#include "codec/cuda/block.cuh"
#include "collectives/cuda/chunk_sizes.h"

namespace tandem::gpu {

/// Calls `with(block, lane, on)` for this thread's blocks of a chunk, convergently in each warp.
template <typename With>
__device__ void for_chunk_blocks(int64_t elements, const With& with) {
  const int64_t count = (elements + kWireBlock - 1) / kWireBlock;
  const int thread = int(threadIdx.x), lane = thread % kQuad;
  for (int64_t first = thread / 32 * (32 / kQuad); first < count;
       first += int(blockDim.x) / kQuad) {
    const int64_t block = first + thread % 32 / kQuad;
    with(block < count ? block : count - 1, lane, block < count);
  }
}

/// Encodes `elements` values into a message laid out as `chunk`, the layout of a whole chunk.
template <typename Block>
__device__ void encode_chunk(const WireParams& chunk, DType dtype, const void* values,
                             int64_t elements, std::byte* message) {
  for_chunk_blocks(elements, [&](int64_t block, int lane, bool on) {
    float x[kLaneValues];
    load_elements(values, dtype, elements, block, lane, on, x);
    Block encoded;
    encoded.encode(chunk, x, lane);
    encoded.store(chunk, message, block, lane, on);
  });
}

template <typename Block>
__device__ void decode_chunk(const WireParams& chunk, DType dtype, const std::byte* message,
                             int64_t elements, void* values) {
  for_chunk_blocks(elements, [&](int64_t block, int lane, bool on) {
    Block encoded;
    encoded.load(chunk, message, block, lane);
    float x[kLaneValues];
    encoded.decode(chunk, lane, x);
    store_elements(values, dtype, elements, block, lane, on, x);
  });
}

}  // namespace tandem::gpu
