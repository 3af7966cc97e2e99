// Encoding and decoding of a block of 128 elements by four threads of a warp; same bytes as the CPU
// (codec/encode.cc). Distribution of elements over threads: block_memory.cuh; of group scales:
// groups.cuh.
#pragma once

#include "codec/cuda/codes.cuh"
#include "codec/cuda/transforms.cuh"

namespace tandem::gpu {

enum class Transform { none, rotation, spikes };

/// One block, in the registers of its threads.
template <typename FormatType, Transform kTransform>
struct EncodedBlock {
  using Format = FormatType;
  static constexpr Transform transform = kTransform;
  static constexpr int kLow = codec::narrow_bits(Format::bits);
  static constexpr bool kCentered = IsLevels<Format>;
  struct None {};

  uint32_t codes[kCodeWords];
  uint32_t scale[kOwned];   // f32 bits, of the owned groups
  uint32_t center[kOwned];  // as stored
  std::conditional_t<transform == Transform::spikes, OwnedSpikes, None> spikes;

  /// Overwrites `x`.
  __device__ void encode(const WireParams& wire, float (&x)[kLaneValues], int lane) {
    if constexpr (transform == Transform::spikes) reserve_spikes(wire, lane, x, spikes);
    if constexpr (transform == Transform::rotation) rotate(x, wire.group, lane);
    float minimum[kOwned] = {}, maximum[kOwned];
    join_values(wire, lane, x, kCentered ? max_or_nan : max_magnitude, maximum);
    if constexpr (kCentered) join_values(wire, lane, x, min_or_nan, minimum);
    GroupNumbers numbers{};
    bool clamps = false;
#pragma unroll
    for (int k = 0; k < kOwned; ++k) {
      if (k < owned_groups(wire)) make_numbers(wire, minimum[k], maximum[k], k, numbers, clamps);
    }
    float inverse[kVectors], middle[kVectors] = {};
    spread_groups(wire, numbers.inverse, inverse);
    if constexpr (kCentered) spread_groups(wire, numbers.center, middle);
    const auto t = [&](int e) {
      const float from = kCentered ? __fadd_rn(x[e], -middle[e / 4]) : x[e];
      return __fmul_rn(from, inverse[e / 4]);
    };
    if (!__any_sync(kAllLanes, clamps)) return make_codes<Format>(t, codes);
    float end[kVectors];
    spread_groups(wire, numbers.maximum, end);
    make_codes<Format>([&](int e) { return codec::clamped(t(e), end[e / 4]); }, codes);
  }

  /// Calls `with(e, value)` with the decoded values of the block that `encode` or `load` filled.
  template <typename With>
  __device__ void for_decoded(const WireParams& wire, int lane, const With& with) const {
    if constexpr (transform == Transform::none) {
      decode_codes(wire, with);
    } else {
      float x[kLaneValues];
      decode_codes(wire, [&](int e, float value) { x[e] = value; });
      if constexpr (transform == Transform::rotation) rotate_back(x, wire.group, wire.limit, lane);
      if constexpr (transform == Transform::spikes) restore_spikes(wire, lane, spikes, x);
#pragma unroll
      for (int e = 0; e < kLaneValues; ++e) with(e, x[e]);
    }
  }
  __device__ void decode(const WireParams& wire, int lane, float (&x)[kLaneValues]) const {
    for_decoded(wire, lane, [&](int e, float value) { x[e] = value; });
  }

  /// Stores to block `block` of a message.
  __device__ void store(const WireParams& wire, std::byte* message, int64_t block, int lane,
                        bool on) const {
    Plane<Format::bits - kLow, kLow> wide;
    wide.pack(codes, lane);
    Plane<kLow == 0 ? 1 : kLow, 0> low;
    if constexpr (kLow > 0) low.pack(codes, lane);
    if (!on) return;
    wide.store(message + wire.layout.wide, block, lane);
    if constexpr (kLow > 0) low.store(message + wire.layout.narrow, block, lane);
    if (!stores_owned(wire, lane)) return;
#pragma unroll
    for (int k = 0; k < kOwned; ++k) {
      const int64_t group = owned_group(wire, block, lane, k);
      if (k >= owned_groups(wire) || group >= wire.layout.groups) continue;
      const uint32_t stored = with_kind(
          wire.scale, [&]<ScaleKind kind>() { return codec::stored_scale<kind>(scale[k]); });
      store_number(wire.scale, message + wire.layout.scales, group, stored);
      if constexpr (kCentered) {
        store_number(wire.scale, message + wire.layout.centers, group, center[k]);
      }
      if constexpr (transform == Transform::spikes) {
        reinterpret_cast<uint32_t*>(message + wire.layout.spikes)[group] = spikes.values[k];
        reinterpret_cast<uint16_t*>(message + wire.layout.positions)[group] =
            uint16_t(spikes.positions[k]);
      }
    }
  }

  /// Block as stored in a message, possibly still being loaded until it is opened.
  struct Fetched {
    Plane<Format::bits - kLow, kLow> wide;
    Plane<kLow == 0 ? 1 : kLow, 0> low;
    uint32_t scale[kOwned], center[kOwned];
    std::conditional_t<transform == Transform::spikes, OwnedSpikes, None> spikes;
  };
  __device__ static Fetched fetch(const WireParams& wire, const std::byte* message, int64_t block,
                                  int lane) {
    Fetched all{};
    all.wide.load(message + wire.layout.wide, block, lane);
    if constexpr (kLow > 0) all.low.load(message + wire.layout.narrow, block, lane);
#pragma unroll
    for (int k = 0; k < kOwned; ++k) {
      const int64_t group = owned_group(wire, block, lane, k);
      const bool is_there = k < owned_groups(wire) && group < wire.layout.groups;
      const auto number = [&](size_t shard) {
        return is_there ? load_number(wire.scale, message + shard, group) : 0;
      };
      all.scale[k] = number(wire.layout.scales);
      all.center[k] = kCentered ? number(wire.layout.centers) : 0;
      if constexpr (transform == Transform::spikes) {
        const auto* values = reinterpret_cast<const uint32_t*>(message + wire.layout.spikes);
        const auto* positions = reinterpret_cast<const uint16_t*>(message + wire.layout.positions);
        all.spikes.values[k] = is_there ? __ldcg(values + group) : 0;
        all.spikes.positions[k] = is_there ? __ldcg(positions + group) : 0;
      }
    }
    return all;
  }
  __device__ void open(const WireParams& wire, Fetched all, int lane) {
#pragma unroll
    for (int k = 0; k < kOwned; ++k) {
      scale[k] = with_kind(
          wire.scale, [&]<ScaleKind kind>() { return codec::scale_of_stored<kind>(all.scale[k]); });
      center[k] = all.center[k];
    }
    spikes = all.spikes;
#pragma unroll
    for (uint32_t& word : codes) word = 0;
    all.wide.unpack(codes, lane);
    if constexpr (kLow > 0) all.low.unpack(codes, lane);
  }
  __device__ void load(const WireParams& wire, const std::byte* message, int64_t block, int lane) {
    open(wire, fetch(wire, message, block, lane), lane);
  }

 private:
  struct GroupNumbers {
    float inverse[kOwned], center[kOwned], maximum[kOwned];
  };

  __device__ void make_numbers(const WireParams& wire, float minimum, float maximum, int k,
                               GroupNumbers& numbers, bool& clamps) {
    numbers.maximum[k] = Format::maximum;
    if constexpr (kCentered) {
      const bool beyond = !(max_magnitude(minimum, maximum) <= wire.limit);
      const codec::LevelScale all = level_scale(wire.scale, minimum, maximum, beyond, wire.limit);
      scale[k] = all.scale, center[k] = all.stored_center;
      numbers.inverse[k] = all.inverse, numbers.center[k] = all.center;
      clamps = clamps || beyond || wire.scale == ScaleKind::log2;
    } else {
      center[k] = 0, numbers.center[k] = 0;
      const float need = __fmul_rn(maximum, 1.0f / Format::maximum);
      scale[k] = with_kind(wire.scale, [&]<ScaleKind kind>() {
        return codec::scale_at_least<kind>(codec::bits_of(need));
      });
      if (!(maximum <= wire.limit)) scale[k] = codec::kNaNBits;
      const float value = codec::float_of<float>(scale[k]);
      numbers.inverse[k] = __frcp_rn(value);
      if (__fmul_rn(value, Format::maximum) <= wire.limit) return;
      clamps = true;
      if (scale[k] == codec::kNaNBits) {
        numbers.inverse[k] = 0;
      } else {
        numbers.maximum[k] = codec::max_within<Format>(value, wire.limit);
      }
    }
  }

  __device__ static codec::LevelScale level_scale(ScaleKind kind, float minimum, float maximum,
                                                  bool beyond, float limit) {
    constexpr int levels = Format::levels;
    if (kind == ScaleKind::bf16) {
      return codec::level_scale<ScaleKind::bf16>(minimum, maximum, beyond, levels, limit);
    }
    if (kind == ScaleKind::f32) {
      return codec::level_scale<ScaleKind::f32>(minimum, maximum, beyond, levels, limit);
    }
    return codec::level_scale<ScaleKind::log2>(minimum, maximum, beyond, levels, limit);
  }
  __device__ static float center_of(ScaleKind kind, uint32_t stored, uint32_t scale) {
    if constexpr (kCentered) {
      if (kind == ScaleKind::log2) {
        return codec::center_of_stored<ScaleKind::log2>(stored, codec::float_of<float>(scale),
                                                        Format::levels);
      }
    }
    return codec::float_of<float>(kind == ScaleKind::bf16 ? stored << 16 : stored);
  }

  template <typename With>
  __device__ void decode_codes(const WireParams& wire, const With& with) const {
    uint32_t scales[kVectors];
    spread_groups(wire, scale, scales);
    float middle[kVectors] = {};
    if constexpr (kCentered) {
      float owned[kOwned];
#pragma unroll
      for (int k = 0; k < kOwned; ++k) owned[k] = center_of(wire.scale, center[k], scale[k]);
      spread_groups(wire, owned, middle);
    }
    for_values<Format>(codes, [&](int e, float value) {
      float x = __fmul_rn(value, codec::float_of<float>(scales[e / 4]));
      if constexpr (kCentered) {
        x = min_or_nan(max_or_nan(__fadd_rn(x, middle[e / 4]), -wire.limit), wire.limit);
      }
      with(e, x);
    });
  }
};

/// Zeroes the padding between a message's sections. Called by one warp.
__device__ inline void clear_between(const WireParams& wire, std::byte* message, int thread) {
  const codec::Message& m = wire.layout;
  const int64_t number = m.groups * codec::scale_bytes(wire.scale);
  const size_t ends[4] = {m.centers, m.spikes, m.positions, m.bytes};
  const size_t begins[4] = {m.scales + size_t(number), m.centers + size_t(number),
                            m.spikes + size_t(m.groups * 4), m.positions + size_t(m.groups * 2)};
#pragma unroll
  for (int shard = 0; shard < 4; ++shard) {
    const size_t at = begins[shard] + size_t(thread);
    if (at < ends[shard]) message[at] = std::byte{};
  }
}

/// Calls `with(block, lane, on)` for a thread's blocks of `count`, with all threads of a warp
/// converged.
template <typename With>
__device__ void for_blocks(int64_t count, const With& with) {
  const int64_t thread = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  const int64_t step = int64_t(gridDim.x) * blockDim.x / kQuad;
  const int lane = int(threadIdx.x) % kQuad;
  for (int64_t first = thread / 32 * (32 / kQuad); first < count; first += step) {
    const int64_t block = first + int(threadIdx.x) % 32 / kQuad;
    with(block < count ? block : count - 1, lane, block < count);
  }
}

/// Calls `with.operator()<EncodedBlock<...>>()` for the wire's format.
template <typename With>
auto with_block(const Wire& wire, const With& with) {
  return codec::with_format(wire, [&]<typename Format>(Format) {
    if constexpr (!IsSmallFloat<Format> && Format::bits <= 4) {
      if (wire.hadamard)
        return with.template operator()<EncodedBlock<Format, Transform::rotation>>();
    }
    if constexpr (!IsSmallFloat<Format> && Format::bits <= 3) {
      if (wire.spikes) return with.template operator()<EncodedBlock<Format, Transform::spikes>>();
    }
    return with.template operator()<EncodedBlock<Format, Transform::none>>();
  });
}

}  // namespace tandem::gpu
