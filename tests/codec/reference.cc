#include "tests/codec/reference.h"

#include <cstring>

#include "codec/numbers.h"
#include "codec/spikes.h"
#include "tandem/random.h"

namespace tandem::test {
namespace {

using namespace codec;

/// Bits [first, first + bits) of each code, in a plane of `bits` per code.
struct Plane {
  std::byte* at;
  int bits, first;

  /// Finds the word of 2 x `bits` bytes with the element's bits, and the shift within it.
  void locate(int64_t i, size_t& byte, int& shift) const {
    const int64_t block = i / kWireBlock;
    const int within = int(i % kWireBlock), vector = within / 16, lane = within % 16;
    const size_t begin = size_t(block) * kWireBlock / 8 * size_t(bits);
    const int position = bits == 8 ? 8 * within : lane * 8 * bits + vector * bits;
    byte = begin + size_t(position / 8);
    shift = position % 8;
  }
  void put(int64_t i, uint32_t code) const {
    size_t byte;
    int shift;
    locate(i, byte, shift);
    at[byte] |= std::byte(((code >> first) & ((1u << bits) - 1)) << shift);
  }
  uint32_t get(int64_t i) const {
    size_t byte;
    int shift;
    locate(i, byte, shift);
    return ((uint32_t(at[byte]) >> shift) & ((1u << bits) - 1)) << first;
  }
};

std::vector<Plane> planes_of(const Wire& wire, const Message& layout, std::byte* message) {
  const int bits = code_bits(wire.codec), low = narrow_bits(bits);
  std::vector<Plane> planes{{message + layout.wide, bits - low, low}};
  if (low) planes.push_back({message + layout.narrow, low, 0});
  return planes;
}

template <typename With>
auto with_kind(ScaleKind kind, const With& with) {
  switch (kind) {
    case ScaleKind::bf16:
      return with(std::integral_constant<ScaleKind, ScaleKind::bf16>());
    case ScaleKind::f32:
      return with(std::integral_constant<ScaleKind, ScaleKind::f32>());
    case ScaleKind::log2:
      return with(std::integral_constant<ScaleKind, ScaleKind::log2>());
    case ScaleKind::e8m0:
      break;
  }
  return with(std::integral_constant<ScaleKind, ScaleKind::e8m0>());
}

/// H x / group, summed in the order that the format prescribes.
void hadamard(float* x, int group) {
  for (int i = 0; i < group; ++i) x[i] *= 1.0f / float(group);
  for (int stride = 1; stride < group; stride *= 2) {
    for (int i = 0; i < group; ++i) {
      if (i & stride) continue;
      const float a = x[i], b = x[i + stride];
      x[i] = a + b;
      x[i + stride] = a - b;
    }
  }
}

/// Parameters that encode the values of one group.
struct GroupCoder {
  uint32_t scale = 0, stored_scale = 0, stored_center = 0;
  float center = 0, inverse = 0, maximum = 0;
};

template <typename Format, ScaleKind kind>
GroupCoder coder_of(const std::vector<float>& x, float limit) {
  float minimum = x[0], largest = x[0];
  uint32_t magnitude = 0;
  for (const float value : x) {
    if (value < minimum) minimum = value;
    if (value > largest) largest = value;
    magnitude = std::max(magnitude, bits_of(value) & 0x7fffffffu);
  }
  const bool beyond = magnitude > bits_of(limit);
  GroupCoder coder;
  if constexpr (requires { Format::levels; }) {
    const LevelScale all = level_scale<kind>(minimum, largest, beyond, Format::levels, limit);
    coder = {all.scale,   stored_scale<kind>(all.scale), all.stored_center, all.center,
             all.inverse, float(Format::levels) / 2};
  } else {
    const float need = float_of<float>(magnitude) * (1.0f / Format::maximum);
    coder.scale = beyond ? kNaNBits : scale_at_least<kind>(bits_of(need));
    coder.stored_scale = stored_scale<kind>(coder.scale);
    coder.maximum = Format::maximum;
    if (coder.scale != kNaNBits) {
      coder.inverse = 1 / float_of<float>(coder.scale);
      coder.maximum = max_within<Format>(float_of<float>(coder.scale), limit);
    }
  }
  return coder;
}

/// Noise of element `i`, in steps.
float noise_of(const Dither& dither, int64_t i) {
  const auto words = philox(dither.seed, dither.stream, uint64_t(i / 64 * 16 + i % 16));
  return (float(words[size_t(i / 16 % 4)] >> 8) - 0x1p23f + 0.5f) * 0x1p-24f;
}

template <typename Format>
uint32_t code_of(const GroupCoder& coder, float x, const Dither* dither, int64_t i) {
  if constexpr (requires { Format::levels; }) x = x - coder.center;
  x = x * coder.inverse;
  if (dither) x = x + noise_of(*dither, i);
  return Format::code(clamped(x, coder.maximum));
}

Spikes spikes_of(const float* x, int group, float limit) {
  int minimum = 0, maximum = 0;
  bool finite = true;
  for (int i = 0; i < group; ++i) {
    finite = finite && (bits_of(x[i]) & 0x7fffffffu) <= bits_of(limit);
    if (x[i] < x[minimum]) minimum = i;
    if (x[i] > x[maximum]) maximum = i;
  }
  return finite ? spikes_at(x, minimum, maximum, limit) : kNoSpikes;
}

}  // namespace

std::vector<std::byte> reference_message(const Wire& wire, const std::vector<float>& values,
                                         DType dtype, const Dither* dither) {
  const int64_t count = int64_t(values.size());
  const Message layout = Message::of(wire, count);
  std::vector<std::byte> message(layout.bytes);
  const auto planes = planes_of(wire, layout, message.data());
  const size_t bytes = size_t(scale_bytes(wire.scale));
  std::vector<float> all = values;
  all.resize(size_t(layout.blocks) * kWireBlock, values.back());
  for (int64_t first = 0; first < int64_t(all.size()); first += wire.group) {
    std::vector<float> x(all.begin() + first, all.begin() + first + wire.group);
    const int64_t group = first / wire.group;
    const bool is_stored = group < layout.groups;
    if (wire.spikes) {
      const Spikes spikes = spikes_of(x.data(), wire.group, largest_of(dtype));
      remove_spikes(spikes, x.data());
      if (is_stored) {
        store_spikes(spikes, group, &message[layout.spikes], &message[layout.positions]);
      }
    }
    if (wire.hadamard) hadamard(x.data(), wire.group);
    with_format(wire, [&](auto format) {
      using Format = decltype(format);
      const GroupCoder coder = with_kind(wire.scale, [&](auto kind) {
        return coder_of<Format, decltype(kind)::value>(x, largest_of(dtype));
      });
      if (is_stored) {
        std::memcpy(&message[layout.scales + bytes * size_t(group)], &coder.stored_scale, bytes);
      }
      if (is_stored && wire.asymmetric) {
        std::memcpy(&message[layout.centers + bytes * size_t(group)], &coder.stored_center, bytes);
      }
      for (int i = 0; i < wire.group; ++i) {
        const uint32_t code = code_of<Format>(coder, x[size_t(i)], dither, first + i);
        for (const Plane& plane : planes) plane.put(first + i, code);
      }
    });
  }
  return message;
}

std::vector<float> reference_values(const Wire& wire, const std::vector<std::byte>& message,
                                    int64_t count) {
  const Message layout = Message::of(wire, count);
  std::vector<std::byte> copy = message;
  const auto planes = planes_of(wire, layout, copy.data());
  const size_t bytes = size_t(scale_bytes(wire.scale));
  std::vector<float> values(size_t(layout.blocks) * kWireBlock);
  for (int64_t group = 0; group < layout.groups; ++group) {
    uint32_t stored = 0, center = 0;
    std::memcpy(&stored, &message[layout.scales + bytes * size_t(group)], bytes);
    if (wire.asymmetric) {
      std::memcpy(&center, &message[layout.centers + bytes * size_t(group)], bytes);
    }
    float* x = &values[size_t(group * wire.group)];
    with_format(wire, [&](auto format) {
      using Format = decltype(format);
      with_kind(wire.scale, [&](auto kind) {
        const float scale = float_of<float>(scale_of_stored<decltype(kind)::value>(stored));
        for (int i = 0; i < wire.group; ++i) {
          uint32_t code = 0;
          for (const Plane& plane : planes) code |= plane.get(group * wire.group + i);
          x[i] = Format::template value<float>(code) * scale;
          if constexpr (requires { Format::levels; }) {
            x[i] += center_of_stored<decltype(kind)::value>(center, scale, Format::levels);
            x[i] = within(x[i], largest_of(DType::f32));
          }
        }
      });
    });
    if (wire.hadamard) {
      hadamard(x, wire.group);
      const float maximum = largest_of(DType::f32) / float(wire.group);
      for (int i = 0; i < wire.group; ++i) x[i] = within(x[i], maximum) * float(wire.group);
    }
    if (wire.spikes) {
      restore_spikes(load_spikes(&message[layout.spikes], &message[layout.positions], group),
                     wire.group, x);
    }
  }
  values.resize(size_t(count));
  return values;
}

}  // namespace tandem::test
