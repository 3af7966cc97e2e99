#include <cstring>

#include "codec/planes.h"
#include "codec/spikes.h"
#include "codec/tiles.h"

namespace tandem::codec {
namespace {

struct Numbers {
  uint32_t scale[kMaxGroups] = {};
  float center[kMaxGroups] = {};
};

template <typename Stored>
uint32_t stored_at(const std::byte* from, int index) {
  Stored stored;
  std::memcpy(&stored, from + sizeof stored * size_t(index), sizeof stored);
  return stored;
}

template <ScaleKind kind, typename Stored>
void load_numbers(const std::byte* scales, const std::byte* centers, int groups, int levels,
                  Numbers& numbers) {
  for (int g = 0; g < groups; ++g) {
    const uint32_t scale = scale_of_stored<kind>(stored_at<Stored>(scales, g));
    numbers.scale[g] = (scale & 0x7fffffffu) > 0x7f800000u ? kNaNBits : scale;
  }
  if (!levels) return;
  for (int g = 0; g < groups; ++g) {
    const float center = center_of_stored<kind>(stored_at<Stored>(centers, g),
                                                float_of<float>(numbers.scale[g]), levels);
    numbers.center[g] = center == center ? center : float_of<float>(kNaNBits);
  }
}

/// `levels`: 0 if there are no centers.
void load_numbers(ScaleKind kind, const std::byte* scales, const std::byte* centers, int groups,
                  int levels, Numbers& numbers) {
  switch (kind) {
    case ScaleKind::bf16:
      return load_numbers<ScaleKind::bf16, uint16_t>(scales, centers, groups, levels, numbers);
    case ScaleKind::f32:
      return load_numbers<ScaleKind::f32, uint32_t>(scales, centers, groups, levels, numbers);
    case ScaleKind::log2:
      return load_numbers<ScaleKind::log2, uint8_t>(scales, centers, groups, levels, numbers);
    case ScaleKind::e8m0:
      return load_numbers<ScaleKind::e8m0, uint8_t>(scales, centers, groups, levels, numbers);
  }
}

template <typename Format>
void read_codes(const std::byte* wide, const std::byte* low, int blocks, int group,
                const Numbers& numbers, float limit, float* values) {
  const int shift = std::countr_zero(unsigned(group));
  for (int block = 0; block < blocks; ++block, values += kWireBlock) {
    WordLanes codes[kVectors];
    unpack<Format::bits>(wide, low, block, codes);
    for (int j = 0; j < kVectors; ++j) {
      const int g = (block * kWireBlock + j * kLanes) >> shift;
      const FloatLanes scale = FloatLanes{} + float_of<float>(numbers.scale[g]);
      FloatLanes x = product(Format::template value<FloatLanes>(codes[j]), scale);
      if constexpr (requires { Format::levels; }) {
        x = within(sum(x, FloatLanes{} + numbers.center[g]), limit);
      }
      store_floats(values + kLanes * j, x);
    }
  }
}

}  // namespace

struct TileDecoder::Pass {
  template <typename Format>
  static void run(const TileDecoder& d, int64_t first, int count, float* values) {
    const int group = d.wire_.group, blocks = (count + kWireBlock - 1) / kWireBlock;
    const int groups = (count + group - 1) / group, bytes = scale_bytes(d.wire_.scale);
    int levels = 0;
    if constexpr (requires { Format::levels; }) levels = Format::levels;
    Numbers numbers;
    load_numbers(d.wire_.scale, d.message_ + d.layout_.scales + first / group * bytes,
                 d.message_ + d.layout_.centers + first / group * bytes, groups, levels, numbers);
    constexpr int kLow = narrow_bits(Format::bits);
    read_codes<Format>(d.message_ + d.layout_.wide + first / 8 * (Format::bits - kLow),
                       d.message_ + d.layout_.narrow + first / 8 * kLow, blocks, group, numbers,
                       d.limit_, values);
    if (d.wire_.hadamard) rotate_back(values, blocks * kWireBlock, group, d.limit_);
    if (!d.wire_.spikes) return;
    for (int g = 0; g < groups; ++g) {
      restore_spikes(load_spikes(d.message_ + d.layout_.spikes, d.message_ + d.layout_.positions,
                                 first / group + g),
                     group, values + g * group);
    }
  }
};

TileDecoder::TileDecoder(const Wire& wire, int64_t elements, float limit, const std::byte* message)
    : wire_(wire), layout_(Message::of(wire, elements)), limit_(limit), message_(message) {
  decode_ = with_format(wire, [](auto format) -> Function { return Pass::run<decltype(format)>; });
}

void TileDecoder::get(int64_t first, int count, float* values) const {
  decode_(*this, first, count, values);
}

}  // namespace tandem::codec
