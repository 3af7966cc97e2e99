// Chunks of encoded blocks passed between kernels: each block of 128 values is encoded or decoded
// by four lanes of a warp, and kThreads / 4 blocks are contiguous. First the codes, 16 bytes per
// thread, all threads' first four words before the second ones; then the scales, bf16, by block and
// group. Codes and scales are those of a message (codec/message.h), in another order.
#pragma once

#include "codec/cuda/block.cuh"

namespace tandem::gpu {

/// `Code`: format of codec/numbers.h, 8 or 4 bits; kGroup: 128 or 32 elements that share a bf16
/// scale.
template <class Code, int kGroup, int kThreads>
struct EncodedChunk {
  static_assert(Code::bits == 8 || Code::bits == 4);
  static_assert(kGroup == 128 || kGroup == 32);
  static constexpr int kBlocks = kThreads / kQuad;
  static constexpr int kElements = kBlocks * kWireBlock;
  static constexpr int kWords = Code::bits;            // per thread
  static constexpr int kScales = kWireBlock / kGroup;  // per block
  static constexpr int kCodeBytes = kThreads * kWords * 4;
  static constexpr int kBytes = kCodeBytes + kBlocks * kScales * 2;
  static_assert(kBytes % 16 == 0);

  uint32_t words[kWords];
  uint32_t scale;  // stored form, of the group whose scale this thread stores

  /// Encodes a thread's values, distributed as in codec/cuda/block_memory.cuh. Called by all lanes
  /// of a warp. `limit`: a group beyond it decodes as NaN (WireParams).
  __device__ void encode(float (&x)[kLaneValues], float limit, int thread) {
    WireParams wire;
    wire.group = kGroup, wire.shift = kGroup == 128 ? 7 : 5;
    wire.limit = limit;
    EncodedBlock<Code, Transform::none> block;
    block.encode(wire, x, thread % kQuad);
    if constexpr (Code::bits == 8) {
#pragma unroll
      for (int w = 0; w < kWords; ++w) words[w] = block.codes[w];
    } else {
      Plane<4, 0> plane;
      plane.pack(block.codes, thread % kQuad);
#pragma unroll
      for (int w = 0; w < kWords; ++w) words[w] = plane.words[w];
    }
    scale = codec::stored_scale<ScaleKind::bf16>(block.scale[0]);
  }
  __device__ void store(std::byte* chunk, int thread) const {
#pragma unroll
    for (int w = 0; w < kWords; w += 4) {
      reinterpret_cast<uint4*>(chunk)[w / 4 * kThreads + thread] =
          make_uint4(words[w], words[w + 1], words[w + 2], words[w + 3]);
    }
    auto* const scales = reinterpret_cast<uint16_t*>(chunk + kCodeBytes);
    if constexpr (kScales == 4) {
      scales[thread] = uint16_t(scale);
    } else {
      if (thread % kQuad == 0) scales[thread / kQuad] = uint16_t(scale);
    }
  }

  /// Calls `with(e, code, scale)` for a thread's values, which are code x scale, exact in f32.
  /// `load`: load policy.
  template <typename Load, typename With>
  __device__ static void for_values_of(const std::byte* chunk, int thread, const Load& load,
                                       const With& with) {
    uint32_t stored[kWords];
#pragma unroll
    for (int w = 0; w < kWords; w += 4) {
      const uint4 four = load(reinterpret_cast<const uint4*>(chunk) + w / 4 * kThreads + thread);
      stored[w] = four.x, stored[w + 1] = four.y, stored[w + 2] = four.z, stored[w + 3] = four.w;
    }
    float scales[kScales];
    load_scales(chunk + kCodeBytes, thread, load, scales);
    uint32_t codes[kCodeWords];
    if constexpr (Code::bits == 8) {
#pragma unroll
      for (int w = 0; w < kWords; ++w) codes[w] = stored[w];
    } else {
      Plane<4, 0> plane;
#pragma unroll
      for (int w = 0; w < kWords; ++w) plane.words[w] = stored[w];
#pragma unroll
      for (uint32_t& word : codes) word = 0;
      plane.unpack(codes, thread % kQuad);
    }
    for_values<Code>(codes,
                     [&](int e, float code) { with(e, code, scales[16 * (e / 4) / kGroup]); });
  }

 private:
  template <typename Load>
  __device__ static void load_scales(const std::byte* from, int thread, const Load& load,
                                     float (&scales)[kScales]) {
    if constexpr (kScales == 4) {
      const uint2 four = load(reinterpret_cast<const uint2*>(from) + thread / kQuad);
      scales[0] = codec::float_of<float>(four.x << 16);
      scales[1] = codec::float_of<float>(four.x & 0xffff0000u);
      scales[2] = codec::float_of<float>(four.y << 16);
      scales[3] = codec::float_of<float>(four.y & 0xffff0000u);
    } else {
      const uint32_t one = load(reinterpret_cast<const uint16_t*>(from) + thread / kQuad);
      scales[0] = codec::float_of<float>(one << 16);
    }
  }
};

}  // namespace tandem::gpu
