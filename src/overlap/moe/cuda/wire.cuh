// Rows of a Mixture-of-Experts layer in a wire format, eight blocks of 128 elements at a time, by a
// whole warp. Each row is a separate message. Sections of whole blocks are encoded independently:
// no group spans two blocks.
#pragma once

#include "codec/cuda/block.cuh"

namespace tandem::gpu {

/// Blocks per warp at once.
constexpr int kWarpBlocks = 32 / kQuad;

/// Calls `with(row, first)` for a warp's share of `rows` x blocks [begin, end), `first` being the
/// first of up to kWarpBlocks.
template <typename With>
__device__ void for_row_slices(int64_t rows, int64_t begin, int64_t end, const With& with) {
  const int64_t layout = (end - begin + kWarpBlocks - 1) / kWarpBlocks;
  const int64_t warps = int64_t(gridDim.x) * blockDim.x / 32;
  for (int64_t i = (int64_t(blockIdx.x) * blockDim.x + threadIdx.x) / 32; i < rows * layout;
       i += warps) {
    with(i / layout, begin + i % layout * kWarpBlocks);
  }
}

/// A thread's position in one of the blocks [first, end); if there is none, `on` is false and it
/// repeats the last one's work without storing it.
struct BlockPosition {
  int64_t block;
  int lane;
  bool on;
  __device__ BlockPosition(int64_t first, int64_t end) {
    const int64_t wanted = first + int(threadIdx.x) % 32 / kQuad;
    on = wanted < end;
    block = on ? wanted : end - 1;
    lane = int(threadIdx.x) % kQuad;
  }
};

/// A layer's rows are bf16 or f16: leaving out the f32 code saves registers.
__device__ inline DType half_dtype(DType dtype) {
  return dtype == DType::bf16 ? DType::bf16 : DType::f16;
}

/// Encodes a row's values to its message, and writes their decoded values to `decoded`; either may
/// be null.
template <typename Block>
__device__ void encode_row(const WireParams& wire, DType dtype, const void* values, int64_t first,
                           std::byte* message, void* decoded) {
  const BlockPosition at(first, wire.layout.blocks);
  float x[kLaneValues];
  load_elements(values, half_dtype(dtype), wire.layout.elements, at.block, at.lane, at.on, x);
  Block encoded;
  encoded.encode(wire, x, at.lane);
  if (message) encoded.store(wire, message, at.block, at.lane, at.on);
  if (!decoded) return;
  encoded.decode(wire, at.lane, x);
  store_elements(decoded, half_dtype(dtype), wire.layout.elements, at.block, at.lane, at.on, x);
}

template <typename Block>
__device__ void decode_row(const WireParams& wire, DType dtype, const std::byte* message,
                           int64_t first, void* values) {
  const BlockPosition at(first, wire.layout.blocks);
  Block encoded;
  encoded.load(wire, message, at.block, at.lane);
  float x[kLaneValues];
  encoded.decode(wire, at.lane, x);
  store_elements(values, half_dtype(dtype), wire.layout.elements, at.block, at.lane, at.on, x);
}

/// Expert results of a row: rows place[k] of `results`; those below 0 are skipped.
struct ExpertResults {
  const void* results;
  DType dtype;
  int64_t columns;  // a multiple of 4
  const int32_t* position;
  const float* weights;  // null: each is 1
  int count;

  /// Adds them in f32, as add_weighted of overlap/moe/cuda/weighted_sum.cuh does; nothing past the
  /// end of the row.
  __device__ void add_to(float (&sum)[kLaneValues], const BlockPosition& at) const {
    const int64_t first = at.block * kWireBlock + 4 * at.lane;
    for (int k = 0; k < count; ++k) {
      if (position[k] < 0) continue;
      const auto* const from =
          static_cast<const uint16_t*>(results) + position[k] * columns + first;
      const float weight = weights ? weights[k] : 1.0f;
      uint2 four[kVectors];
#pragma unroll
      for (int j = 0; j < kVectors; ++j) {
        const bool there = first + 4 * kQuad * j < columns;
        four[j] = there ? reinterpret_cast<const uint2*>(from)[kQuad * j] : make_uint2(0, 0);
      }
      const auto add = [&](DType known) {
#pragma unroll
        for (int e = 0; e < kLaneValues; e += 2) {
          const float2 two = widened(known, e % 4 ? four[e / 4].y : four[e / 4].x);
          sum[e] = __fmaf_rn(weight, two.x, sum[e]);
          sum[e + 1] = __fmaf_rn(weight, two.y, sum[e + 1]);
        }
      };
      dtype == DType::bf16 ? add(DType::bf16) : add(DType::f16);
    }
  }
};

/// Encodes the sum of a row's results, rounded to their dtype, to its message. Blocks [first, end).
template <typename Block>
__device__ void encode_sum(const WireParams& wire, const ExpertResults& from, int64_t first,
                           int64_t end, std::byte* message) {
  const BlockPosition at(first, end);
  float sum[kLaneValues] = {};
  from.add_to(sum, at);
  const DType dtype = half_dtype(from.dtype);
#pragma unroll
  for (int e = 0; e < kLaneValues; e += 2) {
    const float2 two = widened(dtype, narrowed(dtype, sum[e], sum[e + 1]));
    sum[e] = two.x, sum[e + 1] = two.y;
  }
  fill_up(from.columns, at.block, at.lane, sum);
  Block encoded;
  encoded.encode(wire, sum, at.lane);
  encoded.store(wire, message, at.block, at.lane, at.on);
}

/// Adds a message's decoded values.
template <typename Block>
__device__ void add_message(const WireParams& wire, const std::byte* message,
                            const BlockPosition& at, float (&sum)[kLaneValues]) {
  Block encoded;
  encoded.load(wire, message, at.block, at.lane);
  encoded.for_decoded(wire, at.lane,
                      [&](int e, float value) { sum[e] = __fadd_rn(sum[e], value); });
}

}  // namespace tandem::gpu
