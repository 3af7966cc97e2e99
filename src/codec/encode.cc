// Encoding in passes over a tile: group ranges, scales, codes.
#include <cstring>

#include "codec/dither.h"
#include "codec/planes.h"
#include "codec/ranges.h"
#include "codec/spikes.h"
#include "codec/tiles.h"

namespace tandem::codec {
namespace {

/// `noise`: added to each value, in steps of a code, if kDithers.
template <typename Format, bool kClamps, bool kDithers>
void write_codes(const float* x, const float* noise, int blocks, int group,
                 const GroupNumbers& numbers, std::byte* wide, std::byte* low) {
  const int shift = std::countr_zero(unsigned(group));
  for (int block = 0; block < blocks; ++block, x += kWireBlock, noise += kDithers * kWireBlock) {
    WordLanes codes[kVectors];
    for (int j = 0; j < kVectors; ++j) {
      const int g = (block * kWireBlock + j * kLanes) >> shift;
      FloatLanes t = load_floats(x + kLanes * j);
      if constexpr (requires { Format::levels; }) t = t - numbers.center[g];
      t = product(t, FloatLanes{} + numbers.inverse[g]);
      if constexpr (kDithers) t = sum(t, load_floats(noise + kLanes * j));
      if constexpr (kClamps) t = clamped(t, FloatLanes{} + numbers.maximum[g]);
      codes[j] = Format::code(t);
    }
    pack<Format::bits>(codes, block, wide, low);
  }
}

template <typename Format>
void write_codes(const float* x, const float* noise, int blocks, int group,
                 const GroupNumbers& numbers, std::byte* wide, std::byte* low) {
  if constexpr (Format::half_step == 0.5f) {  // integers
    // Clamped: noise may lift the largest value past the last code.
    if (noise) {
      return write_codes<Format, true, true>(x, noise, blocks, group, numbers, wide, low);
    }
  }
  return numbers.clamps
             ? write_codes<Format, true, false>(x, noise, blocks, group, numbers, wide, low)
             : write_codes<Format, false, false>(x, noise, blocks, group, numbers, wide, low);
}

}  // namespace

/// Implementation of `put`, by format.
struct TileEncoder::Pass {
  template <typename Format>
  static void run(const TileEncoder& e, int64_t first, int count, const float* values) {
    const int group = e.wire_.group, blocks = (count + kWireBlock - 1) / kWireBlock;
    const int all_groups = blocks * (kWireBlock / group), groups = (count + group - 1) / group;
    alignas(64) float changed[kTile];
    if (e.wire_.spikes || e.wire_.hadamard) {
      std::memcpy(changed, values, sizeof(float) * size_t(blocks) * kWireBlock);
      values = changed;
    }
    if (e.wire_.spikes) reserve_spikes(e, first / group, all_groups, groups, changed);
    if (e.wire_.hadamard) rotate(changed, blocks * kWireBlock, group);
    alignas(64) float noise[kTile];
    if (e.dither_) fill_noise(*e.dither_, first, blocks * kWireBlock, noise);
    const float* added = e.dither_ ? noise : nullptr;
    GroupNumbers numbers;
    std::byte* scales = e.message_ + e.layout_.scales + first / group * scale_bytes(e.wire_.scale);
    std::byte* wide = e.message_ + e.layout_.wide;
    std::byte* low = e.message_ + e.layout_.narrow;
    constexpr int kLow = narrow_bits(Format::bits);
    wide += first / 8 * (Format::bits - kLow);
    low += first / 8 * kLow;
    if constexpr (requires { Format::levels; }) {
      std::byte* centers =
          e.message_ + e.layout_.centers + first / group * scale_bytes(e.wire_.scale);
      measure_ranges(values, all_groups, group, numbers);
      make_levels(e.wire_.scale, Format::levels, all_groups, groups, e.limit_, numbers, scales,
                  centers);
      write_codes<Format>(values, added, blocks, group, numbers, wide, low);
    } else {
      measure_magnitudes(values, all_groups, group, numbers);
      make_scales<Format>(e.wire_.scale, all_groups, groups, e.limit_, numbers, scales);
      write_codes<Format>(values, added, blocks, group, numbers, wide, low);
    }
  }

  static void reserve_spikes(const TileEncoder& e, int64_t first_group, int all_groups, int groups,
                             float* values) {
    for (int g = 0; g < all_groups; ++g, values += e.wire_.group) {
      const Spikes spikes = find_spikes(values, e.wire_.group, e.limit_);
      remove_spikes(spikes, values);
      if (g >= groups) continue;
      store_spikes(spikes, first_group + g, e.message_ + e.layout_.spikes,
                   e.message_ + e.layout_.positions);
    }
  }
};

TileEncoder::TileEncoder(const Wire& wire, int64_t elements, float limit, std::byte* message,
                         const Dither* dither)
    : wire_(wire),
      layout_(Message::of(wire, elements)),
      limit_(limit),
      message_(message),
      dither_(dither) {
  // Zero the padding between sections.
  for (const size_t end : {layout_.centers, layout_.spikes, layout_.positions, layout_.bytes}) {
    if (end > layout_.scales) std::memset(message + end - 16, 0, 16);
  }
  encode_ = with_format(wire, [](auto format) -> Function { return Pass::run<decltype(format)>; });
}

void TileEncoder::put(int64_t first, int count, const float* values) const {
  encode_(*this, first, count, values);
}

}  // namespace tandem::codec
