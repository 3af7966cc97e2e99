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
inline LosslessJob whole_chunk(DType dtype) {
  return LosslessJob::of(kLosslessChunkBytes / (dtype == DType::f32 ? 4 : 2), dtype);
}
__device__ inline LosslessJob chunk_of(const LosslessJob& whole, int64_t elements) {
  LosslessJob job = whole;
  job.elements = elements;
  job.blocks = (elements + kWireBlock - 1) / kWireBlock;
  job.groups = (elements + codec::kLosslessGroup - 1) / codec::kLosslessGroup;
  job.tiles = (job.blocks + kChunkTile - 1) / kChunkTile;
  job.room = 16 + size_t(elements) * (job.dtype == DType::f32 ? 4 : 2);
  return job;
}
/// Bytes used of a message that this thread block has made.
__device__ inline size_t used_bytes(const LosslessJob& job, const std::byte* message) {
  const auto* const header = reinterpret_cast<const uint32_t*>(message);
  return header[0] ? job.parts.escapes + header[1] : job.room;
}

/// Called by a warp, after all warps have finished the previous pass. Pass 0: planes; 1: header and
/// sums, by the first warp; 2: escapes.
__device__ inline void encode_chunk_pass(const LosslessJob& job, int pass, const void* values,
                                         std::byte* message) {
  const int warp = int(threadIdx.x) / 32, lane = int(threadIdx.x) % 32;
  if (pass == 0) {
    for (int64_t tile = warp; tile < job.tiles; tile += kChunkWarps) {
      encode_tile<kChunkTile>(job, values, tile, lane, message);
    }
  }
  if (pass == 1 && warp == 0) sum_escapes<kChunkTile>(job, 0, lane, message);
  if (pass == 2 && 32 * warp < job.groups && *reinterpret_cast<const uint32_t*>(message)) {
    write_escapes(job, values, 32 * warp, lane, message);
  }
}
/// Pass 0: all values except escapes; 1: escapes.
__device__ inline void decode_chunk_pass(const LosslessJob& job, int pass, const std::byte* message,
                                         void* values) {
  const int warp = int(threadIdx.x) / 32, lane = int(threadIdx.x) % 32;
  if (pass == 0) {
    constexpr int64_t kStep = 32 / kQuad;
    for (int64_t block = warp * kStep; block < job.blocks; block += kChunkWarps * kStep) {
      decode_blocks(job, message, block, lane, values);
    }
  } else if (32 * warp < job.groups) {
    decode_escapes(job, message, 32 * warp, lane, values);
  }
}

}  // namespace tandem::gpu
