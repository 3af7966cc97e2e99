// Packing of a block's 128 codes in a message, relative to element order:
//
//   8 bits   byte i is element i
//   4 bits   32-bit word w has element 16 j + w in bits 4 j
//   2 bits   16-bit word w has it in bits 2 j
//   1 bit    byte w has it in bit j
//
// So 16 SIMD lanes, or twice 8, or 4 GPU threads with 4 lanes each, pack and unpack using only
// shifts.
#pragma once

#include <cstddef>

#include "codec/lanes.h"

namespace tandem::codec {

constexpr int kVectors = kWireBlock / kLanes;
constexpr int kWords = 16;               ///< per plane
constexpr int kSplit = kWords / kLanes;  ///< vectors per kWords elements

/// Packs bits [kFrom, kFrom + kBits) of each code.
template <int kBits, int kFrom>
inline void pack_plane(const WordLanes* codes, std::byte* to) {
  static_assert(kBits == 4 || kBits == 2 || kBits == 1);
  for (int residue = 0; residue < kSplit; ++residue, to += kLanes * kBits) {
    WordLanes all{};
    for (int j = 0; j < kVectors / kSplit; ++j) {
      all |= ((codes[j * kSplit + residue] >> kFrom) & ((1u << kBits) - 1u)) << (kBits * j);
    }
    if constexpr (kBits == 4) store(to, all);
    if constexpr (kBits == 2) store(to, __builtin_convertvector(all, HalfLanes));
    if constexpr (kBits == 1) store(to, __builtin_convertvector(all, ByteLanes));
  }
}

template <int kBits, int kFrom>
inline void unpack_plane(const std::byte* from, WordLanes* codes) {
  for (int residue = 0; residue < kSplit; ++residue, from += kLanes * kBits) {
    WordLanes all{};
    if constexpr (kBits == 4) all = load<WordLanes>(from);
    if constexpr (kBits == 2) all = __builtin_convertvector(load<HalfLanes>(from), WordLanes);
    if constexpr (kBits == 1) all = words_of(load<ByteLanes>(from));
    for (int j = 0; j < kVectors / kSplit; ++j) {
      codes[j * kSplit + residue] |= ((all >> (kBits * j)) & ((1u << kBits) - 1u)) << kFrom;
    }
  }
}

/// Packs a block's codes as bytes.
inline void pack_bytes(const WordLanes* codes, std::byte* to) {
  if constexpr (kLanes == 16) {
    for (int j = 0; j < kVectors; ++j) {
      store(to + kLanes * j, __builtin_convertvector(codes[j], ByteLanes));
    }
  } else {
    // Converts between full registers, for which there are instructions.
    using Words = uint32_t __attribute__((vector_size(64)));
    using Halves = uint16_t __attribute__((vector_size(64)));
    using SixteenHalves = uint16_t __attribute__((vector_size(32)));
    using Bytes = uint8_t __attribute__((vector_size(32)));
    for (int j = 0; j < kVectors; j += 4, to += sizeof(Bytes)) {
      const SixteenHalves halves[2] = {
          __builtin_convertvector(load<Words>(codes + j), SixteenHalves),
          __builtin_convertvector(load<Words>(codes + j + 2), SixteenHalves)};
      store(to, __builtin_convertvector(load<Halves>(halves), Bytes));
    }
  }
}

/// Packs block `index` of kBits-bit codes into the two planes.
template <int kBits>
inline void pack(const WordLanes* codes, int64_t index, std::byte* wide, std::byte* narrow) {
  constexpr int kLow = narrow_bits(kBits), kHigh = kBits - kLow;
  std::byte* to = wide + index * (kWireBlock / 8 * kHigh);
  if constexpr (kBits == 8) {
    pack_bytes(codes, to);
  } else {
    pack_plane<kHigh, kLow>(codes, to);
    if constexpr (kLow > 0) pack_plane<kLow, 0>(codes, narrow + index * (kWireBlock / 8 * kLow));
  }
}

template <int kBits>
inline void unpack(const std::byte* wide, const std::byte* narrow, int64_t index,
                   WordLanes* codes) {
  constexpr int kLow = narrow_bits(kBits), kHigh = kBits - kLow;
  const std::byte* from = wide + index * (kWireBlock / 8 * kHigh);
  if constexpr (kBits == 8) {
    for (int j = 0; j < kVectors; ++j) {
      codes[j] = words_of(load<ByteLanes>(from + kLanes * j));
    }
  } else {
    for (int j = 0; j < kVectors; ++j) codes[j] = WordLanes{};
    unpack_plane<kHigh, kLow>(from, codes);
    if constexpr (kLow > 0) {
      unpack_plane<kLow, 0>(narrow + index * (kWireBlock / 8 * kLow), codes);
    }
  }
}

}  // namespace tandem::codec
