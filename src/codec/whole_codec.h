// Codecs that are exact and take a message as one piece: `lossless`, and what is added to it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "tandem/codec.h"

namespace tandem::codec {

struct WholeCodec {
  std::string_view name;  ///< of a literal
  /// Throws InvalidArgument for a dtype that it does not take.
  void (*require)(DType dtype);
  /// Of a message of so many elements, at most.
  size_t (*most_bytes)(int64_t elements, DType dtype);
  double (*bits_per_element)(DType dtype);
  /// `message` has most_bytes. Returns the bytes used.
  size_t (*encode)(DType dtype, const void* values, int64_t elements, std::byte* message);
  /// Throws InvalidArgument for what is no message.
  void (*decode)(DType dtype, std::span<const std::byte> message, int64_t elements, void* values);
};

/// By number, from Codec::lossless on.
const std::vector<WholeCodec>& whole_codecs();
/// nullptr where it is none of them.
const WholeCodec* find_whole_codec(Codec codec);

/// Before the first world starts, in the same order in every process: from then on Wire::parse
/// knows its name, and collectives and `tandem bench --codec` take it.
Codec add_whole_codec(const WholeCodec& codec);

}  // namespace tandem::codec
