// A block of 128 elements, encoded and decoded by four threads of a warp: the bytes that the CPU
// makes (codec/encode.cc). Who has which element, block_memory.cuh says.
#pragma once

#include "codec/cuda/block_memory.cuh"

namespace tandem::gpu {

/// In place: H x / group (codec/tile.h).
__device__ inline void rotate(float (&x)[kOwn], int group, int lane) {
  const float scale = 1.0f / float(group);
#pragma unroll
  for (float& value : x) value = __fmul_rn(value, scale);
#pragma unroll
  for (int stride = 1; stride < kWireBlock; stride *= 2) {
    if (stride >= group) return;
    float before[kOwn];
#pragma unroll
    for (int e = 0; e < kOwn; ++e) before[e] = x[e];
#pragma unroll
    for (int e = 0; e < kOwn; ++e) {
      float other;
      bool upper;
      if (stride == 4 || stride == 8) {
        other = __shfl_xor_sync(kAllLanes, before[e], stride / 4);
        upper = lane & (stride / 4);
      } else {
        const int bit = stride < 4 ? stride : stride / 4;
        other = before[e ^ bit];
        upper = e & bit;
      }
      x[e] = upper ? __fadd_rn(other, -before[e]) : __fadd_rn(before[e], other);
    }
  }
}

/// One block in a thread's registers.
template <typename Format>
struct EncodedBlock {
  static constexpr int kLow = codec::narrow_bits(Format::bits);
  static constexpr bool kCentered = requires { Format::levels; };
  static constexpr bool kMayRotate = Format::bits <= 4;
  static constexpr bool kMayReserve = Format::bits <= 3;
  struct None {};

  uint32_t codes[kOwn];
  uint32_t scale[kVectors];         // bits of the group's
  uint32_t center[kVectors];        // as stored
  uint32_t spike_values[kVectors];  // smallest, largest, as stored
  uint32_t spike_places[kVectors];

  __device__ void encode(const WireJob& wire, float (&x)[kOwn], int lane) {
    if constexpr (kMayReserve) {
      if (wire.spikes) reserve_spikes(wire, x, lane);
    }
    if constexpr (kMayRotate) {
      if (wire.hadamard) rotate(x, wire.group, lane);
    }
    uint32_t magnitude[kVectors];
    magnitudes(wire, x, magnitude);
    float least[kVectors] = {}, most[kVectors] = {};
    if constexpr (kCentered) ranges(wire, x, least, most);
    GroupNumbers numbers{};
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
      if (begins_group(wire, j)) {
        numbers = numbers_of(wire.scale, wire.limit, magnitude[j], least[j], most[j]);
      }
      scale[j] = numbers.scale, center[j] = numbers.stored_center;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float from = kCentered ? __fadd_rn(x[4 * j + i], -numbers.center) : x[4 * j + i];
        codes[4 * j + i] =
            Format::code(codec::clamped(__fmul_rn(from, numbers.inverse), numbers.most));
      }
    }
  }

  /// What `encode` or `load` has left, as values.
  __device__ void decode(const WireJob& wire, int lane, float (&x)[kOwn]) const {
#pragma unroll
    for (int e = 0; e < kOwn; ++e) {
      const float value = codec::float_of<float>(scale[e / 4]);
      x[e] = __fmul_rn(Format::template value<float>(codes[e]), value);
      if constexpr (kCentered) {
        x[e] =
            codec::within(__fadd_rn(x[e], center_of(wire.scale, center[e / 4], value)), wire.limit);
      }
    }
    if constexpr (kMayRotate) {
      if (wire.hadamard) {
        rotate(x, wire.group, lane);
        const float size = float(wire.group), most = wire.limit / size;
#pragma unroll
        for (float& value : x) value = __fmul_rn(codec::within(value, most), size);
      }
    }
    if constexpr (kMayReserve) {
      if (wire.spikes) restore_spikes(wire, lane, x);
    }
  }

  /// To the message of which this is block `block`.
  __device__ void store(const WireJob& wire, std::byte* message, int64_t block, int lane,
                        bool on) const {
    Plane<Format::bits - kLow, kLow> wide;
    wide.pack(codes, lane);
    Plane<kLow == 0 ? 1 : kLow, 0> low;
    if constexpr (kLow > 0) low.pack(codes, lane);
    if (!on) return;
    wide.store(message + wire.parts.wide, block, lane);
    if constexpr (kLow > 0) low.store(message + wire.parts.narrow, block, lane);
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
      const int64_t group = group_of(wire, block, j);
      if (!begins_group(wire, j) || j % kQuad != lane || group >= wire.parts.groups) continue;
      store_number(wire.scale, message + wire.parts.scales, group,
                   stored_scale(wire.scale, scale[j]));
      if constexpr (kCentered) {
        store_number(wire.scale, message + wire.parts.centers, group, center[j]);
      }
      if constexpr (kMayReserve) {
        if (wire.spikes) {
          reinterpret_cast<uint32_t*>(message + wire.parts.spikes)[group] = spike_values[j];
          reinterpret_cast<uint16_t*>(message + wire.parts.places)[group] =
              uint16_t(spike_places[j]);
        }
      }
    }
  }

  __device__ void load(const WireJob& wire, const std::byte* message, int64_t block, int lane) {
    Plane<Format::bits - kLow, kLow> wide;
    wide.load(message + wire.parts.wide, block, lane);
    Plane<kLow == 0 ? 1 : kLow, 0> low;
    if constexpr (kLow > 0) low.load(message + wire.parts.narrow, block, lane);
#pragma unroll
    for (uint32_t& code : codes) code = 0;
    wide.unpack(codes, lane);
    if constexpr (kLow > 0) low.unpack(codes, lane);
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
      const int64_t group = group_of(wire, block, j);
      if (!begins_group(wire, j)) {
        scale[j] = scale[j - 1], center[j] = center[j - 1];
        spike_values[j] = spike_values[j - 1], spike_places[j] = spike_places[j - 1];
        continue;
      }
      const bool is_there = group < wire.parts.groups;
      const auto number = [&](size_t part) {
        return is_there ? load_number(wire.scale, message + part, group) : 0;
      };
      scale[j] = scale_of_stored(wire.scale, number(wire.parts.scales));
      center[j] = kCentered ? number(wire.parts.centers) : 0;
      spike_values[j] = spike_places[j] = 0;
      if constexpr (kMayReserve) {
        if (wire.spikes && is_there) {
          spike_values[j] =
              __ldcg(reinterpret_cast<const uint32_t*>(message + wire.parts.spikes) + group);
          spike_places[j] =
              __ldcg(reinterpret_cast<const uint16_t*>(message + wire.parts.places) + group);
        }
      }
    }
  }

 private:
  struct GroupNumbers {
    uint32_t scale, stored_center;
    float inverse, center, most;
  };
  // Not inlined: it would be so eight times.
  __device__ __noinline__ static GroupNumbers numbers_of(ScaleKind kind, float limit,
                                                         uint32_t magnitude, float least,
                                                         float most) {
    const bool beyond = magnitude > codec::bits_of(limit);
    if constexpr (kCentered) {
      const codec::LevelScale all = level_scale(kind, least, most, beyond, limit);
      return {all.scale, all.stored_center, all.inverse, all.center, Format::most};
    }
    if (beyond) return {codec::kNaNBits, 0, 0, 0, Format::most};
    const float need = __fmul_rn(codec::float_of<float>(magnitude), 1.0f / Format::most);
    const uint32_t scale = scale_at_least(kind, codec::bits_of(need));
    if (scale == codec::kNaNBits) return {scale, 0, 0, 0, Format::most};
    const float value = codec::float_of<float>(scale);
    const bool reaches = codec::bits_of(__fmul_rn(value, Format::most)) > codec::bits_of(limit);
    return {scale, 0, __frcp_rn(value), 0,
            reaches ? codec::most_within<Format>(value, limit) : Format::most};
  }

  __device__ static void magnitudes(const WireJob& wire, const float (&x)[kOwn],
                                    uint32_t (&of)[kVectors]) {
    const auto join = [](uint32_t a, uint32_t b) { return a > b ? a : b; };
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
      of[j] = 0;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        of[j] = join(of[j], codec::bits_of(x[4 * j + i]) & 0x7fffffffu);
      }
    }
    over_groups(wire.group, of, join);
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
      of[j] = j > 0 && !begins_group(wire, j) ? of[j - 1] : over_quad(of[j], join);
    }
  }
  // Which of two equal values is taken, -0 or 0, the CPU decides by their places, too.
  __device__ static void ranges(const WireJob& wire, const float (&x)[kOwn],
                                float (&least)[kVectors], float (&most)[kVectors]) {
    const auto lower = [](float a, float b) { return b < a ? b : a; };
    const auto upper = [](float a, float b) { return b > a ? b : a; };
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
      least[j] = most[j] = x[4 * j];
#pragma unroll
      for (int i = 1; i < 4; ++i) {
        least[j] = lower(least[j], x[4 * j + i]);
        most[j] = upper(most[j], x[4 * j + i]);
      }
    }
    over_groups(wire.group, least, lower);
    over_groups(wire.group, most, upper);
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
      const bool known = j > 0 && !begins_group(wire, j);
      least[j] = known ? least[j - 1] : over_quad(least[j], lower);
      most[j] = known ? most[j - 1] : over_quad(most[j], upper);
    }
  }

  // A value and where it stands in its group; of equal ones the first.
  struct Spot {
    float value;
    int place;
  };
  __device__ static Spot shuffled(const Spot& spot, int by) {
    return {__shfl_xor_sync(kAllLanes, spot.value, by), __shfl_xor_sync(kAllLanes, spot.place, by)};
  }
  template <typename Before>
  __device__ static void spots(const WireJob& wire, const float (&x)[kOwn], int lane,
                               const Before& before, Spot (&of)[kVectors]) {
    const auto join = [&](const Spot& a, const Spot& b) {
      if (before(b.value, a.value)) return b;
      return before(a.value, b.value) || a.place < b.place ? a : b;
    };
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
      const int first = in_group(wire, 16 * j) + 4 * lane;
      of[j] = {x[4 * j], first};
#pragma unroll
      for (int i = 1; i < 4; ++i) of[j] = join(of[j], {x[4 * j + i], first + i});
    }
    over_groups(wire.group, of, join);
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
      of[j] = join(of[j], shuffled(of[j], 1));
      of[j] = join(of[j], shuffled(of[j], 2));
    }
  }
  __device__ void reserve_spikes(const WireJob& wire, float (&x)[kOwn], int lane) {
    Spot least[kVectors], most[kVectors];
    uint32_t magnitude[kVectors];
    magnitudes(wire, x, magnitude);
    spots(
        wire, x, lane, [](float a, float b) { return a < b; }, least);
    spots(
        wire, x, lane, [](float a, float b) { return a > b; }, most);
    float start[3] = {};  // of the group
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
      if (begins_group(wire, j)) {
#pragma unroll
        for (int i = 0; i < 3; ++i) start[i] = __shfl_sync(kAllLanes, x[4 * j + i], 0, kQuad);
      }
      if (magnitude[j] > codec::bits_of(wire.limit)) {
        spike_values[j] = 0x7fc07fc0u, spike_places[j] = 0;
        continue;
      }
      spike_values[j] = spike_bits(least[j].value, wire.limit) |
                        uint32_t(spike_bits(most[j].value, wire.limit)) << 16;
      spike_places[j] = uint32_t(least[j].place) | uint32_t(most[j].place) << 8;
      int other = 0;
      while (other == least[j].place || other == most[j].place) ++other;
      const float value = other == 0 ? start[0] : other == 1 ? start[1] : start[2];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int place = in_group(wire, 16 * j) + 4 * lane + i;
        if (place == least[j].place || place == most[j].place) x[4 * j + i] = value;
      }
    }
  }
  __device__ static uint16_t spike_bits(float value, float limit) {
    const uint16_t bits = BFloat16::from_float(value).bits;
    const auto end = uint16_t(codec::bits_of(limit) >> 16);
    return (bits & 0x7fff) > end ? uint16_t((bits & 0x8000) | end) : bits;
  }
  __device__ void restore_spikes(const WireJob& wire, int lane, float (&x)[kOwn]) const {
#pragma unroll
    for (int e = 0; e < kOwn; ++e) {
      const int place = in_group(wire, 16 * (e / 4)) + 4 * lane + e % 4;
      const uint32_t places = spike_places[e / 4], values = spike_values[e / 4];
      if (place == in_group(wire, int(places & 0xff))) x[e] = BFloat16{uint16_t(values)}.to_float();
      if (place == in_group(wire, int(places >> 8)))
        x[e] = BFloat16{uint16_t(values >> 16)}.to_float();
    }
  }

  __device__ static uint32_t scale_at_least(ScaleKind kind, uint32_t need) {
    switch (kind) {
      case ScaleKind::bf16:
        return codec::scale_at_least<ScaleKind::bf16>(need);
      case ScaleKind::f32:
        return codec::scale_at_least<ScaleKind::f32>(need);
      case ScaleKind::log2:
        return codec::scale_at_least<ScaleKind::log2>(need);
      case ScaleKind::e8m0:
        break;
    }
    return codec::scale_at_least<ScaleKind::e8m0>(need);
  }
  __device__ static uint32_t stored_scale(ScaleKind kind, uint32_t value) {
    switch (kind) {
      case ScaleKind::bf16:
        return codec::stored_scale<ScaleKind::bf16>(value);
      case ScaleKind::f32:
        return value;
      case ScaleKind::log2:
        return codec::stored_scale<ScaleKind::log2>(value);
      case ScaleKind::e8m0:
        break;
    }
    return codec::stored_scale<ScaleKind::e8m0>(value);
  }
  __device__ __noinline__ static uint32_t scale_of_stored(ScaleKind kind, uint32_t stored) {
    switch (kind) {
      case ScaleKind::bf16:
        return stored << 16;
      case ScaleKind::f32:
        return stored;
      case ScaleKind::log2:
        return codec::scale_of_stored<ScaleKind::log2>(stored);
      case ScaleKind::e8m0:
        break;
    }
    return codec::scale_of_stored<ScaleKind::e8m0>(stored);
  }
  __device__ static codec::LevelScale level_scale(ScaleKind kind, float least, float most,
                                                  bool beyond, float limit) {
    if constexpr (kCentered) {
      constexpr int levels = Format::levels;
      if (kind == ScaleKind::bf16) {
        return codec::level_scale<ScaleKind::bf16>(least, most, beyond, levels, limit);
      }
      if (kind == ScaleKind::f32) {
        return codec::level_scale<ScaleKind::f32>(least, most, beyond, levels, limit);
      }
      return codec::level_scale<ScaleKind::log2>(least, most, beyond, levels, limit);
    }
    return {};
  }
  __device__ static float center_of(ScaleKind kind, uint32_t stored, float scale) {
    if constexpr (kCentered) {
      constexpr int levels = Format::levels;
      if (kind == ScaleKind::log2) {
        return codec::center_of_stored<ScaleKind::log2>(stored, scale, levels);
      }
    }
    return codec::float_of<float>(kind == ScaleKind::bf16 ? stored << 16 : stored);
  }
  __device__ static void store_number(ScaleKind kind, std::byte* part, int64_t index,
                                      uint32_t stored) {
    const int bytes = codec::scale_bytes(kind);
    if (bytes == 4) reinterpret_cast<uint32_t*>(part)[index] = stored;
    if (bytes == 2) reinterpret_cast<uint16_t*>(part)[index] = uint16_t(stored);
    if (bytes == 1) reinterpret_cast<uint8_t*>(part)[index] = uint8_t(stored);
  }
  __device__ static uint32_t load_number(ScaleKind kind, const std::byte* part, int64_t index) {
    const int bytes = codec::scale_bytes(kind);
    if (bytes == 4) return __ldcg(reinterpret_cast<const uint32_t*>(part) + index);
    if (bytes == 2) return __ldcg(reinterpret_cast<const uint16_t*>(part) + index);
    return __ldcg(reinterpret_cast<const uint8_t*>(part) + index);
  }
};

/// What lies between a message's parts is 0: by one warp.
__device__ inline void clear_between(const WireJob& wire, std::byte* message, int thread) {
  const codec::Message& m = wire.parts;
  const int64_t number = m.groups * codec::scale_bytes(wire.scale);
  const size_t ends[4] = {m.centers, m.spikes, m.places, m.bytes};
  const size_t begins[4] = {m.scales + size_t(number), m.centers + size_t(number),
                            m.spikes + size_t(m.groups * 4), m.places + size_t(m.groups * 2)};
  for (int part = 0; part < 4; ++part) {
    const size_t at = begins[part] + size_t(thread);
    if (at < ends[part]) message[at] = std::byte{};
  }
}

/// Calls `with(block, lane, on)` for a thread's blocks of `count`; all threads of a warp together.
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

}  // namespace tandem::gpu
