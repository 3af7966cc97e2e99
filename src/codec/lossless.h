// Lossless format of bf16: exponents near a group's max take few values, so 4 bits encode the
// exponent, a byte holds sign and mantissa, and other exponents escape. For f32 the upper half is
// coded like this and the lower half is stored as is.
//
// A message of at least kMinCoded elements begins with a 16-byte header: the form (0: raw
// elements follow, 1: coded) and the number of escapes, each a 32-bit word. Coded sections, each at
// a multiple of 16 bytes:
//
//   low       f32: the lower halves
//   bytes     one per element: sign, 7 bits of mantissa
//   codes     4 bits per element, packed as in planes.h: 0 ... 13: the exponent is `top` - code;
//             14: it is 0; 15: it escapes
//   tops      a byte per kLosslessGroup elements: their max exponent below 255
//   firsts    a word per group: the number of escapes before it
//   escapes   a byte each: the exponent
//
// A message that coding would make longer is stored raw. Messages below kMinCoded are the
// elements only.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "tandem/codec.h"

namespace tandem::codec {

constexpr int kLosslessGroup = 512;
constexpr int64_t kMinCoded = 1024;
constexpr int kEscape = 15, kZeroExponent = 14;

struct LosslessLayout {
  size_t low = 16, bytes = 0, codes = 0, tops = 0, firsts = 0, escapes = 0;

  static constexpr LosslessLayout of(int64_t elements, DType dtype) {
    const auto whole = [](int64_t bytes) { return size_t(bytes + 15) / 16 * 16; };
    const int64_t blocks = (elements + kWireBlock - 1) / kWireBlock;
    const int64_t groups = (elements + kLosslessGroup - 1) / kLosslessGroup;
    LosslessLayout layout;
    layout.bytes = layout.low + (dtype == DType::f32 ? whole(2 * elements) : 0);
    layout.codes = layout.bytes + size_t(blocks * kWireBlock);
    layout.tops = layout.codes + size_t(blocks * kWireBlock / 2);
    layout.firsts = layout.tops + whole(groups);
    layout.escapes = layout.firsts + whole(4 * groups);
    return layout;
  }
};

/// Size of a raw message, including the header if it has one.
constexpr size_t max_lossless_bytes(int64_t elements, DType dtype) {
  return (elements < kMinCoded ? 0 : 16) + size_t(elements) * size_of(dtype);
}
double lossless_bits(DType dtype);

/// Throws InvalidArgument for a dtype that is neither bf16 nor f32.
void require_lossless(DType dtype);

/// Encodes bf16 or f32; `message` has max_lossless_bytes. Returns the bytes used.
size_t encode_lossless(DType dtype, const void* values, int64_t elements, std::byte* message);
/// `values` has memory for `elements`. Throws InvalidArgument for an invalid message.
void decode_lossless(DType dtype, std::span<const std::byte> message, int64_t elements,
                     void* values);

}  // namespace tandem::codec
