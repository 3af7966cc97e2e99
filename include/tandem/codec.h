// Wire formats: what a collective sends instead of a tensor's own elements. A Wire names a codec
// and how it groups elements, and knows how many bytes a number of elements becomes. Encoding is a
// pure function of the values, the same on every processor. docs/wire-formats.md has the layout of
// a message.
//
// If a group holds a NaN or an infinity, all of it decodes as NaN; only `lossless` (and `none`)
// keep every bit pattern. Integers decode -0 as 0. Finite values stay finite over the whole range
// of the tensor's dtype, except with scales of ScaleKind::log2. Magnitudes below the smallest step,
// 2^-126, decode as 0 or as that step.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "tandem/export.h"
#include "tandem/tensor.h"

TANDEM_API_BEGIN
namespace tandem {

enum class Codec : uint8_t {
  none,  ///< the elements as they are
  int8,  ///< integers with a scale per group; 6, 5 and 3 bits as planes of 4 + 2, 4 + 1, 2 + 1
  int6,
  int5,
  int4,
  int3,
  int2,
  e4m3,  ///< FP8 with a scale per group
  e5m2,
  mxfp8,  ///< OCP MX: E4M3, E2M3 and E2M1 with a power of two (E8M0) per 32
  mxfp6,
  mxfp4,
  lossless,  ///< bf16 to the last bit, in about 12.1 bits; later codecs are exact, too
};

/// How a group's scale is stored.
enum class ScaleKind : uint8_t {
  bf16,
  f32,
  /// 8 bits, 2^(k/4 - 44): scales from 2^-44 to 2^19.5. Values that need a larger one
  /// decode as NaN; values that need a smaller one are off by up to 2^-45.
  log2,
  e8m0,  ///< for the MX formats, and no others
};

/// A wire format. Its text is `CODEC[:gGROUP][:asym][:f32|:log2][:spikes][:hadamard]`, such as
/// `int8`, `int4:g32` or `int2:g64:asym:spikes`.
struct Wire {
  Codec codec = Codec::none;
  /// Elements that share a scale: 16, 32, 64 or 128; MX: 32. Groups count from the first element
  /// of a message.
  int group = 128;
  ScaleKind scale = ScaleKind::bf16;
  /// Integers: levels reach from the group's smallest to its largest value, instead of from minus
  /// to plus its largest magnitude.
  bool asymmetric = false;
  /// At most 3 bits: a group's smallest and largest element travel in bf16 beside the codes, whose
  /// scale is that of the rest (Flash Communication V2, arXiv 2508.03760, "spike reserving").
  bool spikes = false;
  /// Integers of at most 4 bits, without `spikes`: a Hadamard matrix rotates each group first
  /// (SDP4Bit, arXiv 2410.15526), which spreads an outlier's error.
  bool hadamard = false;

  /// Throws InvalidArgument with what was expected: an unknown codec or option, a group that is
  /// none of the above, an option that the codec does not have.
  static Wire parse(std::string_view text);
  /// The shortest text that `parse` turns into this; "none".
  std::string describe() const;
  /// Throws InvalidArgument as `parse` does.
  void check() const;

  bool is_none() const { return codec == Codec::none; }
  /// Whether decoding gives the bits that were encoded.
  bool is_exact() const { return codec == Codec::none || codec >= Codec::lossless; }
  /// Bytes of a message of `elements`: exact, for `lossless` the most. Messages of whole blocks of
  /// kWireBlock elements waste none.
  size_t bytes(int64_t elements, DType dtype) const;
  /// For a large message of elements of `dtype`; for `lossless` without escapes.
  double bits_per_element(DType dtype) const;
  /// The largest |decoded - value| over the largest magnitude of the value's group, in f32, where
  /// that magnitude is 2^-119 or more (with `log2`: 2^-36; with `e5m2` 2^-110, with `e4m3` 2^-117):
  /// docs/wire-formats.md.
  double error_bound() const;

  bool operator==(const Wire&) const = default;
};

/// Elements per block, in which codes are packed.
constexpr int kWireBlock = 128;

std::string_view name_of(Codec codec);

/// Encodes `values` (f32, bf16 or f16; lossless: bf16 or f32; contiguous, host memory) and returns
/// the message's bytes. Throws InvalidArgument for another dtype or when `message` is shorter than
/// `wire.bytes(elements, dtype)`.
size_t encode(const Wire& wire, const Tensor& values, std::span<std::byte> message);
/// Decodes into all of `values`, of the dtype that was encoded. Reads nothing outside `message` and
/// writes nothing outside `values`, whatever the message holds; throws InvalidArgument when it is
/// too short for `values` or no message of this wire.
void decode(const Wire& wire, std::span<const std::byte> message, const Tensor& values);

}  // namespace tandem
TANDEM_API_END
