// Vectors of 16 or 8 floats or words, using compiler vector types: compiled to AVX-512, AVX2, SSE
// or NEON, whichever the target has. They must not be wider than its registers: arrays of such
// vectors would be spilled to memory.
#pragma once

#include <cstring>

#include "codec/numbers.h"
#include "tandem/dtype.h"

namespace tandem::codec {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#else
constexpr int kLanes = 8;
#endif
using FloatLanes = float __attribute__((vector_size(4 * kLanes)));
using WordLanes = uint32_t __attribute__((vector_size(4 * kLanes)));
using HalfLanes = uint16_t __attribute__((vector_size(2 * kLanes)));
using ByteLanes = uint8_t __attribute__((vector_size(kLanes)));

template <>
struct WordsOf<FloatLanes> {
  using type = WordLanes;
};

template <typename V>
inline V load(const void* from) {
  V all;
  std::memcpy(&all, from, sizeof all);
  return all;
}
template <typename V>
inline void store(void* to, const V& all) {
  std::memcpy(to, &all, sizeof all);
}

inline FloatLanes load_floats(const float* from) {
  return load<FloatLanes>(from);
}
inline FloatLanes load_floats(const BFloat16* from) {
  return float_of<FloatLanes>(__builtin_convertvector(load<HalfLanes>(from), WordLanes) << 16);
}
inline FloatLanes load_floats(const Float16* from) {
  const WordLanes half = __builtin_convertvector(load<HalfLanes>(from), WordLanes);
  const WordLanes magnitude = (half & 0x7fffu) << 13;
  const WordLanes normal = magnitude + (112u << 23);
  // Subnormal: append its bits to those of 2^-14, then subtract 2^-14.
  const WordLanes small = bits_of(float_of<FloatLanes>(magnitude + (113u << 23)) - 0x1p-14f);
  const WordLanes finite = magnitude < (1u << 23) ? small : normal;
  const WordLanes all = magnitude >= (31u << 23) ? magnitude | 0x7f800000u : finite;
  return float_of<FloatLanes>(all | (half & 0x8000u) << 16);
}

/// x, with every NaN replaced by the one NaN that codecs produce: the NaN bits of arithmetic differ
/// between processors and compilers.
inline FloatLanes canonical(const FloatLanes& x) {
  return x == x ? x : float_of<FloatLanes>(WordLanes{} + kNaNBits);
}

inline void store_floats(float* to, const FloatLanes& x) {
  store(to, x);
}
inline void store_floats(BFloat16* to, const FloatLanes& x) {
  const WordLanes bits = bits_of(x);
  const WordLanes rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const WordLanes nan = (bits >> 16) | 0x40u;
  const WordLanes all = (bits & 0x7fffffffu) > 0x7f800000u ? nan : rounded;
  store(to, __builtin_convertvector(all, HalfLanes));
}
inline void store_floats(Float16* to, const FloatLanes& x) {
  const WordLanes bits = bits_of(x), magnitude = bits & 0x7fffffffu;
  const WordLanes normal = ((magnitude + 0xfffu + ((magnitude >> 13) & 1u)) >> 13) - (112u << 10);
  const WordLanes small = bits_of(float_of<FloatLanes>(magnitude) + 0.5f) - 0x3f000000u;
  const WordLanes finite = magnitude < 0x38800000u ? small : normal;
  const WordLanes bounded = magnitude >= 0x477ff000u ? WordLanes{} + 0x7c00u : finite;
  const WordLanes nan = ((magnitude >> 13) & 0x3ffu) | 0x7e00u;
  const WordLanes all = (magnitude > 0x7f800000u ? nan : bounded) | ((bits >> 16) & 0x8000u);
  store(to, __builtin_convertvector(all, HalfLanes));
}

/// Widens in two steps, for which there are instructions.
inline WordLanes words_of(const ByteLanes& bytes) {
  return __builtin_convertvector(__builtin_convertvector(bytes, HalfLanes), WordLanes);
}

/// Lane indices, from 0.
template <typename V>
inline V lane_numbers() {
  V all{};
  for (int i = 0; i < kLanes; ++i) all[i] = i;
  return all;
}

/// Reduces 8 or 16 lanes with `with`, by halves.
template <typename Eight, typename With>
requires(sizeof(Eight) == 32) inline auto reduced(const Eight& eight, const With& with) {
  const auto four = with(__builtin_shufflevector(eight, eight, 0, 1, 2, 3),
                         __builtin_shufflevector(eight, eight, 4, 5, 6, 7));
  const auto two = with(four, __builtin_shufflevector(four, four, 2, 3, 2, 3));
  return with(two[0], two[1]);
}
template <typename All, typename With>
requires(sizeof(All) == 64) inline auto reduced(const All& all, const With& with) {
  return reduced(with(__builtin_shufflevector(all, all, 0, 1, 2, 3, 4, 5, 6, 7),
                      __builtin_shufflevector(all, all, 8, 9, 10, 11, 12, 13, 14, 15)),
                 with);
}
constexpr auto kSmaller = [](auto a, auto b) { return a < b ? a : b; };
constexpr auto kLarger = [](auto a, auto b) { return a > b ? a : b; };

inline uint32_t largest_lane(const WordLanes& all) {
  return reduced(all, kLarger);
}
inline uint32_t smallest_lane(const WordLanes& all) {
  return reduced(all, kSmaller);
}
inline float largest_lane(const FloatLanes& all) {
  return reduced(all, kLarger);
}
inline float smallest_lane(const FloatLanes& all) {
  return reduced(all, kSmaller);
}

}  // namespace tandem::codec
