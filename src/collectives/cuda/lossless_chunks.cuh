// Encoding of a chunk of a lossless message between two ranks by a thread block: an independent
// message in the format of codec/lossless.h, except that a shorter chunk has the offsets of a whole
// one. It is built in the sender's shared memory, since passes read what earlier ones wrote; only
// the used bytes are sent to the receiver.
#pragma once

#include "codec/cuda/lossless.cuh"
#include "collectives/cuda/chunk_sizes.h"

namespace tandem::gpu {

constexpr int kChunkWarps = 8;

constexpr int64_t kChunkTile = 8;  // blocks of a warp in the first pass

/// Layout of a whole chunk.
inline LosslessParams whole_chunk(DType dtype) {
  return LosslessParams::of(kLosslessChunkBytes / (dtype == DType::f32 ? 4 : 2), dtype);
}
__device__ inline LosslessParams chunk_of(const LosslessParams& whole, int64_t elements) {
  LosslessParams params = whole;
  params.elements = elements;
  params.blocks = (elements + kWireBlock - 1) / kWireBlock;
  params.groups = (elements + codec::kLosslessGroup - 1) / codec::kLosslessGroup;
  params.tiles = (params.blocks + kChunkTile - 1) / kChunkTile;
  params.room = 16 + size_t(elements) * (params.dtype == DType::f32 ? 4 : 2);
  return params;
}
/// Bytes used of a message that this thread block has made.
__device__ inline size_t used_bytes(const LosslessParams& params, const std::byte* message) {
  const auto* const header = reinterpret_cast<const uint32_t*>(message);
  return header[0] ? params.layout.escapes + header[1] : params.room;
}

/// Called by a warp, after all warps have finished the previous pass. Pass 0: planes; 1: header and
/// sums, by the first warp; 2: escapes.
__device__ inline void encode_chunk_pass(const LosslessParams& params, int pass, const void* values,
                                         std::byte* message) {
  const int warp = int(threadIdx.x) / 32, lane = int(threadIdx.x) % 32;
  if (pass == 0) {
    for (int64_t tile = warp; tile < params.tiles; tile += kChunkWarps) {
      encode_tile<kChunkTile>(params, values, tile, lane, message);
    }
  }
  if (pass == 1 && warp == 0) sum_escapes<kChunkTile>(params, 0, lane, message);
  if (pass == 2 && 32 * warp < params.groups && *reinterpret_cast<const uint32_t*>(message)) {
    write_escapes(params, values, 32 * warp, lane, message);
  }
}
/// Pass 0: all values except escapes; 1: escapes.
__device__ inline void decode_chunk_pass(const LosslessParams& params, int pass,
                                         const std::byte* message, void* values) {
  const int warp = int(threadIdx.x) / 32, lane = int(threadIdx.x) % 32;
  if (pass == 0) {
    constexpr int64_t kStep = 32 / kQuad;
    for (int64_t block = warp * kStep; block < params.blocks; block += kChunkWarps * kStep) {
      decode_blocks(params, message, block, lane, values);
    }
  } else if (32 * warp < params.groups) {
    decode_escapes(params, message, 32 * warp, lane, values);
  }
}

}  // namespace tandem::gpu
