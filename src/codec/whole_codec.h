// Exact codecs that process a message as a whole: `lossless` and those registered in addition.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "tandem/codec.h"

namespace tandem::codec {

struct WholeCodec {
  std::string_view name;  ///< a string literal
  /// Throws InvalidArgument for an unsupported dtype.
  void (*require)(DType dtype);
  /// Max message size for `elements`.
  size_t (*max_bytes)(int64_t elements, DType dtype);
  double (*bits_per_element)(DType dtype);
  /// `message` has max_bytes. Returns the bytes used.
  size_t (*encode)(DType dtype, const void* values, int64_t elements, std::byte* message);
  /// Throws InvalidArgument for an invalid message.
  void (*decode)(DType dtype, std::span<const std::byte> message, int64_t elements, void* values);
};

/// Indexed from Codec::lossless.
const std::vector<WholeCodec>& whole_codecs();
/// nullptr for other codecs.
const WholeCodec* find_whole_codec(Codec codec);

/// Registers a codec. Call before the first world starts, in the same order in every process;
/// afterwards Wire::parse knows its name, and collectives and `tandem bench --codec` accept it.
Codec add_whole_codec(const WholeCodec& codec);

}  // namespace tandem::codec
