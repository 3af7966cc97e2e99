// Layout of an encoded message, computed by the same functions on host and device. Described in
// docs/reference/wire-formats.md.
//
//   codes, wide plane     blocks x 128 x wide bits
//   codes, narrow plane   blocks x 128 x narrow bits, the low bits of 6, 5 and 3
//   scales                one per group
//   centers               one per group, asymmetric formats
//   spikes                per group: min, max (bf16), and their positions (a byte each)
//
// Every section begins at a multiple of 16 bytes.
#pragma once

#include "tandem/codec.h"

namespace tandem::codec {

/// Bits of a code.
constexpr int code_bits(Codec codec) {
  switch (codec) {
    case Codec::int8:
    case Codec::e4m3:
    case Codec::e5m2:
    case Codec::mxfp8:
      return 8;
    case Codec::int6:
    case Codec::mxfp6:
      return 6;
    case Codec::int5:
      return 5;
    case Codec::int4:
    case Codec::mxfp4:
      return 4;
    case Codec::int3:
      return 3;
    case Codec::int2:
      return 2;
    case Codec::none:
    case Codec::lossless:
      break;
  }
  return 0;
}
/// Bits of a code stored in the narrow plane.
constexpr int narrow_bits(int bits) {
  return bits == 6 ? 2 : bits == 5 || bits == 3 ? 1 : 0;
}

constexpr int scale_bytes(ScaleKind kind) {
  switch (kind) {
    case ScaleKind::f32:
      return 4;
    case ScaleKind::bf16:
      return 2;
    case ScaleKind::log2:
    case ScaleKind::e8m0:
      break;
  }
  return 1;
}

constexpr bool is_integer(Codec codec) {
  return codec >= Codec::int8 && codec <= Codec::int2;
}
constexpr bool is_mx(Codec codec) {
  return codec == Codec::mxfp8 || codec == Codec::mxfp6 || codec == Codec::mxfp4;
}
/// Whether codes have a scale per group: all codecs but `none` and `lossless`.
constexpr bool is_grouped(Codec codec) {
  return code_bits(codec) != 0;
}

struct Message {
  int64_t elements = 0, blocks = 0, groups = 0;
  size_t wide = 0, narrow = 0, scales = 0, centers = 0, spikes = 0, positions = 0;
  size_t bytes = 0;

  /// Layout for a grouped codec.
  static constexpr Message of(const Wire& wire, int64_t elements) {
    const auto whole = [](int64_t bytes) { return size_t(bytes + 15) / 16 * 16; };
    Message m;
    m.elements = elements;
    m.blocks = (elements + kWireBlock - 1) / kWireBlock;
    m.groups = (elements + wire.group - 1) / wire.group;
    const int bits = code_bits(wire.codec), low = narrow_bits(bits);
    const int scale = scale_bytes(wire.scale);
    m.narrow = m.wide + whole(m.blocks * kWireBlock / 8 * (bits - low));
    m.scales = m.narrow + whole(m.blocks * kWireBlock / 8 * low);
    m.centers = m.scales + whole(m.groups * scale);
    m.spikes = m.centers + (wire.asymmetric ? whole(m.groups * scale) : 0);
    m.positions = m.spikes + (wire.spikes ? whole(m.groups * 4) : 0);
    m.bytes = m.positions + (wire.spikes ? whole(m.groups * 2) : 0);
    return m;
  }
  /// Proportional share of the message bytes of `count` blocks from `first` on, rounded up; 0 for
  /// blocks past the last.
  constexpr int64_t bytes_of_blocks(int64_t first, int64_t count) const {
    const int64_t left = blocks - first, has = left < count ? left : count;
    return has <= 0 ? 0 : (int64_t(bytes) * has + blocks - 1) / blocks;
  }
};

}  // namespace tandem::codec
