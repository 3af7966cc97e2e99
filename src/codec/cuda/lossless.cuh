// Lossless format (codec/lossless.h) by warps; same bytes as the CPU. A warp processes eight blocks
// at a time, i.e. two groups. Each block's four threads hold the elements given in
// block_memory.cuh, in pairs of halves: pair p has indices 2 p and 2 p + 1.
//
// The offset of a group's escapes depends on all groups before it. Hence three passes: planes and
// each group's number of escapes; prefix sums of those; then the escapes, which are few, from the
// values again.
#pragma once

#include "codec/cuda/codes.cuh"
#include "codec/cuda/loads.cuh"
#include "codec/lossless.h"

namespace tandem::gpu {

constexpr int kPairs = kLaneValues / 2;
constexpr int kGroupLanes = 16;        // lanes of a group's four blocks
constexpr int64_t kTileBlocks = 64;    // per warp in the first pass, with one escape count
constexpr int64_t kScanGroups = 1024;  // per warp in the second

struct LosslessParams {
  codec::LosslessLayout layout;
  int64_t elements, blocks, groups, tiles;
  size_t room;
  DType dtype;

  static LosslessParams of(int64_t elements, DType dtype) {
    const auto in = [](int64_t count, int64_t section) { return (count + section - 1) / section; };
    const int64_t blocks = in(elements, kWireBlock);
    return {codec::LosslessLayout::of(elements, dtype),
            elements,
            blocks,
            in(elements, codec::kLosslessGroup),
            in(blocks, kTileBlocks),
            codec::max_lossless_bytes(elements, dtype),
            dtype};
  }
};

__device__ inline uint32_t* firsts_of(const LosslessParams& params, std::byte* message) {
  return reinterpret_cast<uint32_t*>(message + params.layout.firsts);
}
/// Escape counts per tile, between the first two passes; stored in the space of the later escapes.
__device__ inline uint32_t* totals_of(const LosslessParams& params, std::byte* message) {
  return reinterpret_cast<uint32_t*>(message + params.layout.escapes);
}

/// Zeroes the padding between the sections. Called by 16 threads or more.
__device__ inline void clear_between(const LosslessParams& params, std::byte* message, int thread) {
  const codec::LosslessLayout& layout = params.layout;
  const size_t low = params.dtype == DType::f32 ? 2 * size_t(params.elements) : 0;
  const size_t ends[3] = {layout.bytes, layout.firsts, layout.escapes};
  const size_t begins[3] = {layout.low + low, layout.tops + size_t(params.groups),
                            layout.firsts + 4 * size_t(params.groups)};
#pragma unroll
  for (int section = 0; section < 3; ++section) {
    const size_t at = begins[section] + size_t(thread);
    if (at < ends[section]) message[at] = std::byte{};
  }
}

template <typename V>
__device__ V sum_over(V value, int lanes) {
  for (int by = lanes / 2; by; by /= 2) value += __shfl_xor_sync(kAllLanes, value, by);
  return value;
}

/// Stores the lower halves of f32, which are contiguous in the message: pairs 2 j and 2 j + 1.
__device__ inline void store_low(std::byte* message, const LosslessParams& params, int64_t first,
                                 uint2 four) {
  auto* const to = reinterpret_cast<uint16_t*>(message + params.layout.low);
  if (first + 4 <= params.elements) {
    *reinterpret_cast<uint2*>(to + first) = four;
    return;
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t two = i < 2 ? four.x : four.y;
    if (first + i < params.elements) to[first + i] = uint16_t(two >> (16 * (i % 2)));
  }
}
__device__ inline uint2 load_low(const std::byte* message, const LosslessParams& params,
                                 int64_t first) {
  const auto* const from = reinterpret_cast<const uint16_t*>(message + params.layout.low);
  if (first + 4 <= params.elements) return __ldcg(reinterpret_cast<const uint2*>(from + first));
  const auto at = [&](int i) {
    return first + i < params.elements ? uint32_t(__ldcg(from + first + i)) : 0u;
  };
  return make_uint2(at(0) | at(1) << 16, at(2) | at(3) << 16);
}

/// Loads the upper halves of a thread's elements, in pairs; stores the lower ones of f32 to the
/// message. Past the end the last element is repeated. Zeros if not `on`.
__device__ inline void load_halves(const void* values, const LosslessParams& params, int64_t block,
                                   int lane, bool on, std::byte* message,
                                   uint32_t (&high)[kPairs]) {
  const int64_t first = block * kWireBlock + 4 * lane;
  if (on && is_whole(values, params.dtype, params.elements, block)) {
    if (params.dtype == DType::bf16) {
      const auto* from =
          reinterpret_cast<const uint2*>(static_cast<const uint16_t*>(values) + first);
#pragma unroll
      for (int j = 0; j < kVectors; ++j) {
        const uint2 four = from[kQuad * j];
        high[2 * j] = four.x, high[2 * j + 1] = four.y;
      }
      return;
    }
    const auto* from = reinterpret_cast<const uint4*>(static_cast<const uint32_t*>(values) + first);
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
      const uint4 four = from[kQuad * j];
      high[2 * j] = __byte_perm(four.x, four.y, 0x7632);
      high[2 * j + 1] = __byte_perm(four.z, four.w, 0x7632);
      const uint2 low =
          make_uint2(__byte_perm(four.x, four.y, 0x5410), __byte_perm(four.z, four.w, 0x5410));
      store_low(message, params, first + 16 * j, low);
    }
    return;
  }
  const auto word_at = [&](int j, int i) {
    const int64_t wanted = first + 16 * j + i;
    const int64_t at = wanted < params.elements ? wanted : params.elements - 1;
    if (!on) return 0u;
    return params.dtype == DType::bf16 ? uint32_t(static_cast<const uint16_t*>(values)[at]) << 16
                                       : static_cast<const uint32_t*>(values)[at];
  };
#pragma unroll
  for (int j = 0; j < kVectors; ++j) {
    const uint32_t a = word_at(j, 0), b = word_at(j, 1), c = word_at(j, 2), d = word_at(j, 3);
    high[2 * j] = __byte_perm(a, b, 0x7632), high[2 * j + 1] = __byte_perm(c, d, 0x7632);
    if (on && params.dtype == DType::f32) {
      const uint2 low = make_uint2(__byte_perm(a, b, 0x5410), __byte_perm(c, d, 0x5410));
      store_low(message, params, first + 16 * j, low);
    }
  }
}

/// Stores the elements of pairs 2 j and 2 j + 1.
__device__ inline void store_vector(void* values, const LosslessParams& params, int64_t block,
                                    int lane, int j, uint32_t a, uint32_t b,
                                    const std::byte* message) {
  const int64_t first = block * kWireBlock + 4 * lane + 16 * j;
  const bool whole = is_whole(values, params.dtype, params.elements, block);
  if (params.dtype == DType::bf16) {
    auto* const to = static_cast<uint16_t*>(values) + first;
    if (whole) {
      *reinterpret_cast<uint2*>(to) = make_uint2(a, b);
      return;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (first + i < params.elements) to[i] = uint16_t((i < 2 ? a : b) >> (16 * (i % 2)));
    }
    return;
  }
  const uint2 low = load_low(message, params, first);
  const uint32_t words[4] = {__byte_perm(low.x, a, 0x5410), __byte_perm(low.x, a, 0x7632),
                             __byte_perm(low.y, b, 0x5410), __byte_perm(low.y, b, 0x7632)};
  auto* const to = static_cast<uint32_t*>(values) + first;
  if (whole) {
    *reinterpret_cast<uint4*>(to) = make_uint4(words[0], words[1], words[2], words[3]);
    return;
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (first + i < params.elements) to[i] = words[i];
  }
}

__device__ inline uint32_t exponents_of(uint32_t two) {
  return (two >> 7) & 0x00ff00ffu;
}

/// Max exponent below 255 of a group, in all of its threads.
__device__ inline uint32_t top_of(const uint32_t (&high)[kPairs]) {
  uint32_t maximum = 0;  // maximum of exponent + 1, with 0 for 255
#pragma unroll
  for (const uint32_t two : high) {
    maximum = __vmaxu2(maximum, (exponents_of(two) + 0x00010001u) & 0x00ff00ffu);
  }
  maximum = __vmaxu2(maximum, maximum >> 16) & 0xffffu;
  for (int by = 1; by < kGroupLanes; by *= 2) {
    const uint32_t other = __shfl_xor_sync(kAllLanes, maximum, by);
    maximum = other > maximum ? other : maximum;
  }
  return maximum > 0 ? maximum - 1 : 0;
}

/// Two codes; `escapes` gets a mask of those that escape.
__device__ inline uint32_t two_codes(uint32_t two, uint32_t top, uint32_t& escapes) {
  const uint32_t exponents = exponents_of(two);
  // top - exponent; 255 or more if that is negative.
  const uint32_t below = (top * 0x00010001u + 0x01000100u - exponents) ^ 0x01000100u;
  const uint32_t near = __vminu2(below, 0x000e000eu);
  const uint32_t far = ((near + 0x00020002u) >> 4) & 0x00010001u;
  const uint32_t some = ((exponents + 0x00ff00ffu) >> 8) & 0x00010001u;
  escapes = far & some;
  const uint32_t mask = some * 15;
  return ((near + far) & mask) | (0x000e000eu & ~mask);
}

/// First pass: a tile's planes, and its groups' escape counts. kBlocks: blocks per tile.
template <int64_t kBlocks = kTileBlocks>
__device__ void encode_tile(const LosslessParams& params, const void* values, int64_t tile,
                            int warp_lane, std::byte* message) {
  static_assert(codec::kEscape == 15 && codec::kZeroExponent == 14);
  const int lane = warp_lane % kQuad;
  uint32_t total = 0;
  const int64_t end = min((tile + 1) * kBlocks, params.blocks);
  for (int64_t begin = tile * kBlocks; begin < end; begin += 32 / kQuad) {
    const int64_t block = begin + warp_lane / kQuad;
    const bool on = block < params.blocks;
    uint32_t halves[kPairs];
    load_halves(values, params, block, lane, on, message, halves);
    const uint32_t top = top_of(halves);
    uint32_t low[2] = {}, high[2] = {}, count = 0;
    Plane<8, 0> bytes;
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
      uint32_t rest[2];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const uint32_t two = halves[2 * j + h];
        uint32_t escapes;
        const uint32_t codes = two_codes(two, top, escapes);
        (j < 4 ? low[h] : high[h]) |= codes << (4 * (j % 4));
        rest[h] = ((two >> 8) & 0x00800080u) | (two & 0x007f007fu);
        const int64_t left = params.elements - (block * kWireBlock + 16 * j + 4 * lane + 2 * h);
        if (left < 2) escapes = left < 1 ? 0 : escapes & 0xffffu;
        count += escapes;
      }
      bytes.words[j] = __byte_perm(rest[0], rest[1], 0x6420);
    }
    transpose(bytes.words, lane), transpose(bytes.words + 4, lane);
    count = sum_over(on ? (count & 0xffffu) + (count >> 16) : 0, kGroupLanes);
    const int64_t group = block * kWireBlock / codec::kLosslessGroup;
    if (warp_lane % kGroupLanes == 0 && group < params.groups) {
      message[params.layout.tops + size_t(group)] = std::byte(top);
      firsts_of(params, message)[group] = count;
      total += count;
    }
    if (!on) continue;
    bytes.store(message + params.layout.bytes, block, lane);
    *reinterpret_cast<uint4*>(message + params.layout.codes + block * (kWireBlock / 2) +
                              16 * lane) =
        make_uint4(__byte_perm(low[0], high[0], 0x5410), __byte_perm(low[0], high[0], 0x7632),
                   __byte_perm(low[1], high[1], 0x5410), __byte_perm(low[1], high[1], 0x7632));
  }
  total = sum_over(total, 32);
  if (warp_lane == 0) totals_of(params, message)[tile] = total;
}

/// Second pass: replaces the escape counts of kScanGroups groups by exclusive prefix sums; writes
/// the header.
template <int64_t kBlocks = kTileBlocks>
__device__ void sum_escapes(const LosslessParams& params, int64_t section, int warp_lane,
                            std::byte* message) {
  constexpr int64_t kTileGroups = kBlocks * kWireBlock / codec::kLosslessGroup;
  const uint32_t* const totals = totals_of(params, message);
  const int64_t begin = section * kScanGroups;
  uint32_t before = 0, all = 0;
  for (int64_t tile = warp_lane; tile < params.tiles; tile += 32) {
    const uint32_t total = totals[tile];
    all += total;
    if (tile * kTileGroups < begin) before += total;
  }
  before = sum_over(before, 32), all = sum_over(all, 32);
  if (section == 0 && warp_lane == 0) {
    const bool fits = params.layout.escapes + all <= params.room;
    *reinterpret_cast<uint4*>(message) = make_uint4(fits ? 1 : 0, fits ? all : 0, 0, 0);
  }
  uint32_t* const firsts = firsts_of(params, message);
  const int64_t end = min(begin + kScanGroups, params.groups);
  for (int64_t first = begin; first < end; first += 32) {
    const int64_t group = first + warp_lane;
    const uint32_t local = group < end ? firsts[group] : 0;
    uint32_t up_to = local;
    for (int by = 1; by < 32; by *= 2) {
      const uint32_t other = __shfl_up_sync(kAllLanes, up_to, by);
      if (warp_lane >= by) up_to += other;
    }
    if (group < end) firsts[group] = before + up_to - local;
    before += __shfl_sync(kAllLanes, up_to, 31);
  }
}

/// Calls `with(group, first)`, with all threads, for each group with escapes among the 32 from
/// `begin` on; `first`: index of the group's first escape.
template <typename Load, typename With>
__device__ void for_escaping(const LosslessParams& params, const std::byte* message, int64_t begin,
                             int warp_lane, const Load& load, const With& with) {
  const auto* const firsts = reinterpret_cast<const uint32_t*>(message + params.layout.firsts);
  const uint32_t escapes = load(reinterpret_cast<const uint32_t*>(message) + 1);
  const int64_t group = begin + warp_lane;
  uint32_t first = 0, next = 0;
  if (group < params.groups) {
    first = load(firsts + group);
    next = group + 1 < params.groups ? load(firsts + group + 1) : escapes;
  }
  for (uint32_t some = __ballot_sync(kAllLanes, first != next); some; some &= some - 1) {
    const int lane = __ffs(int(some)) - 1;
    with(begin + lane, __shfl_sync(kAllLanes, first, lane));
  }
}

/// Third pass: writes 32 groups' escapes.
__device__ inline void write_escapes(const LosslessParams& params, const void* values,
                                     int64_t begin, int warp_lane, std::byte* message) {
  for_escaping(params, message, begin, warp_lane, AnyLoad{}, [&](int64_t group, uint32_t first) {
    const uint32_t top = uint32_t(message[params.layout.tops + size_t(group)]);
#pragma unroll 4
    for (int i = 0; i < codec::kLosslessGroup; i += 32) {
      const int64_t at = group * codec::kLosslessGroup + i + warp_lane;
      uint32_t half = 0;
      if (at < params.elements) {
        half = params.dtype == DType::bf16 ? static_cast<const uint16_t*>(values)[at]
                                           : static_cast<const uint32_t*>(values)[at] >> 16;
      }
      uint32_t escapes;
      two_codes(half, top, escapes);
      const uint32_t some = __ballot_sync(kAllLanes, escapes & 1);
      if (escapes & 1) {
        const uint32_t number = first + uint32_t(__popc(some & ((1u << warp_lane) - 1)));
        message[params.layout.escapes + number] = std::byte(half >> 7);
      }
      first += uint32_t(__popc(some));
    }
  });
}

/// Decodes eight blocks from `begin` on, except escaped elements.
__device__ inline void decode_blocks(const LosslessParams& params, const std::byte* message,
                                     int64_t begin, int warp_lane, void* values) {
  const int lane = warp_lane % kQuad;
  const int64_t wanted = begin + warp_lane / kQuad;
  const bool on = wanted < params.blocks;
  const int64_t block = on ? wanted : params.blocks - 1;
  Plane<8, 0> bytes;
  bytes.load(message + params.layout.bytes, block, lane);
  const uint4 words = __ldcg(reinterpret_cast<const uint4*>(message + params.layout.codes +
                                                            block * (kWireBlock / 2) + 16 * lane));
  const uint32_t top = __ldcg(reinterpret_cast<const uint8_t*>(message + params.layout.tops) +
                              block * kWireBlock / codec::kLosslessGroup);
  transpose(bytes.words, lane), transpose(bytes.words + 4, lane);
  const uint32_t low[2] = {__byte_perm(words.x, words.y, 0x5410),
                           __byte_perm(words.z, words.w, 0x5410)};
  const uint32_t high[2] = {__byte_perm(words.x, words.y, 0x7632),
                            __byte_perm(words.z, words.w, 0x7632)};
#pragma unroll
  for (int j = 0; j < kVectors; ++j) {
    uint32_t two[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const uint32_t codes = ((j < 4 ? low[h] : high[h]) >> (4 * (j % 4))) & 0x000f000fu;
      // Code 14 means exponent 0, even if `top` is less than 14.
      const uint32_t some = (((codes ^ 0x000e000eu) + 0x000f000fu) >> 4) & 0x00010001u;
      const uint32_t near = (top * 0x00010001u + 0x01000100u - codes) & 0x00ff00ffu;
      const uint32_t exponents = near & (some * 255u);
      const uint32_t rest = __byte_perm(bytes.words[j], 0, h == 0 ? 0x4140 : 0x4342);
      two[h] = ((rest & 0x00800080u) << 8) | exponents << 7 | (rest & 0x007f007fu);
    }
    if (on) store_vector(values, params, block, lane, j, two[0], two[1], message);
  }
}

/// Decodes the escaped elements of the 32 groups from `begin` on, over the values stored before.
__device__ inline void decode_escapes(const LosslessParams& params, const std::byte* message,
                                      int64_t begin, int warp_lane, void* values) {
  const uint32_t escapes = __ldcg(reinterpret_cast<const uint32_t*>(message) + 1);
  for_escaping(params, message, begin, warp_lane, FreshLoad{}, [&](int64_t group, uint32_t first) {
#pragma unroll 4
    for (int i = 0; i < codec::kLosslessGroup; i += 32) {
      const int64_t at = group * codec::kLosslessGroup + i + warp_lane;
      uint32_t code = 0;
      if (at < params.elements) {
        const int in_block = int(at % kWireBlock);
        const uint32_t word =
            __ldcg(reinterpret_cast<const uint32_t*>(message + params.layout.codes +
                                                     at / kWireBlock * (kWireBlock / 2)) +
                   in_block % 16);
        code = (word >> (4 * (in_block / 16))) & 15;
      }
      const bool escaped = code == codec::kEscape;
      const uint32_t some = __ballot_sync(kAllLanes, escaped);
      if (escaped) {
        const uint32_t number = first + uint32_t(__popc(some & ((1u << warp_lane) - 1)));
        const uint32_t exponent = number < escapes
                                      ? uint32_t(__ldcg(reinterpret_cast<const uint8_t*>(
                                            message + params.layout.escapes + number)))
                                      : 0;
        auto* const half =
            static_cast<uint16_t*>(values) + (params.dtype == DType::bf16 ? at : 2 * at + 1);
        *half = uint16_t((*half & 0x807fu) | exponent << 7);
      }
      first += uint32_t(__popc(some));
    }
  });
}

}  // namespace tandem::gpu
