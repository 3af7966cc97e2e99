// Wire formats: encodings that a collective sends in place of a tensor's elements. A Wire names a
// codec and its grouping of elements, and gives the message size for an element count. Encoding is
// a pure function of the values, the same on every processor. Message layout:
// docs/reference/wire-formats.md.
//
// If a group holds a NaN or an infinity, the whole group decodes as NaN; only `lossless` (and
// `none`) keep every bit pattern. Integer codecs decode -0 as 0. Finite values stay finite over the
// whole range of the tensor's dtype, except with scales of ScaleKind::log2. Magnitudes below the
// smallest step, 2^-126, decode as 0 or as that step.
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
  none,  ///< uncompressed elements
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
  lossless,  ///< bf16, bit-exact, in about 12.1 bits; later codecs are exact, too
};

/// Storage of a group's scale.
enum class ScaleKind : uint8_t {
  bf16,
  f32,
  /// 8 bits, 2^(k/4 - 44): scales from 2^-44 to 2^19.5. Values that need a larger scale decode as
  /// NaN; values that need a smaller one are off by up to 2^-45.
  log2,
  e8m0,  ///< MX formats only
};

/// A wire format. Text form: `CODEC[:gGROUP][:asym][:f32|:log2][:spikes][:hadamard]`, such as
/// `int8`, `int4:g32` or `int2:g64:asym:spikes`.
struct Wire {
  Codec codec = Codec::none;
  /// Elements that share a scale: 16, 32, 64 or 128; MX: 32. Groups count from the first element of
  /// a message.
  int group = 128;
  ScaleKind scale = ScaleKind::bf16;
  /// Integer codecs: levels span [min, max] of the group instead of [-absmax, absmax].
  bool asymmetric = false;
  /// Spike reserving, for codecs of at most 3 bits: min and max of each group are sent in bf16 next
  /// to the codes, whose scale is that of the remaining elements (Flash Communication V2, arXiv
  /// 2508.03760).
  bool spikes = false;
  /// Integer codecs of at most 4 bits, without `spikes`: a Hadamard matrix rotates each group
  /// before quantization (SDP4Bit, arXiv 2410.15526), which spreads an outlier's error.
  bool hadamard = false;

  /// Parses the text form. Throws InvalidArgument, which states the expected form, for an unknown
  /// codec or option, a group size not listed above, or an option that the codec does not have.
  static Wire parse(std::string_view text);
  /// Shortest text that `parse` turns into this Wire; "none" for no wire format.
  std::string describe() const;
  /// Throws InvalidArgument as `parse` does.
  void check() const;

  bool is_none() const { return codec == Codec::none; }
  /// Whether decoding returns the bits that were encoded.
  bool is_exact() const { return codec == Codec::none || codec >= Codec::lossless; }
  /// Message size in bytes for `elements`: exact; for `lossless` the max. Messages of whole blocks
  /// of kWireBlock elements have no padding.
  size_t bytes(int64_t elements, DType dtype) const;
  /// Bits per element of a large message of `dtype`; for `lossless` without escapes.
  double bits_per_element(DType dtype) const;
  /// Max of |decoded - value| relative to the absmax of the value's group, in f32, if that absmax
  /// is at least 2^-119 (with `log2`: 2^-36; with `e5m2`: 2^-110; with `e4m3`: 2^-117). Derivation:
  /// docs/reference/wire-formats.md.
  double error_bound() const;

  bool operator==(const Wire&) const = default;
};

/// Elements per block; codes are packed by block.
constexpr int kWireBlock = 128;

std::string_view name_of(Codec codec);

/// Encodes `values` (f32, bf16 or f16; lossless: bf16 or f32; contiguous, host memory) and returns
/// the message size in bytes. Throws InvalidArgument for another dtype or if `message` is shorter
/// than `wire.bytes(elements, dtype)`.
size_t encode(const Wire& wire, const Tensor& values, std::span<std::byte> message);
/// Decodes into all of `values`, whose dtype is the one that was encoded. Whatever the message
/// holds, reads stay inside `message` and writes inside `values`. Throws InvalidArgument if
/// `message` is too short for `values` or is no message of this wire.
void decode(const Wire& wire, std::span<const std::byte> message, const Tensor& values);

}  // namespace tandem
TANDEM_API_END
