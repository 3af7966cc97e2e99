// Encoding and decoding by tiles, in f32: what a collective adds up stays in the first-level cache
// between its decoding, its sum and its encoding.
#pragma once

#include "codec/message.h"
#include "codec/tile.h"

namespace tandem::codec {

/// Makes one message of a grouped codec. Tiles (tile.h) may come in any order.
class TileEncoder {
 public:
  /// `message` has wire.bytes(elements) bytes. What decodes is at most `limit`, the largest value
  /// of the tensor's dtype; a group beyond it becomes NaN.
  TileEncoder(const Wire& wire, int64_t elements, float limit, std::byte* message);
  /// `values`: `count`, filled up to whole blocks (widen).
  void put(int64_t first, int count, const float* values) const;

  struct Pass;

 private:
  using Function = void (*)(const TileEncoder&, int64_t first, int count, const float* values);
  Wire wire_;
  Message parts_;
  float limit_;
  std::byte* message_;
  Function encode_;
};

class TileDecoder {
 public:
  /// `limit` as of the encoder.
  TileDecoder(const Wire& wire, int64_t elements, float limit, const std::byte* message);
  /// Writes `count` values, and up to whole blocks what was filled up.
  void get(int64_t first, int count, float* values) const;

  struct Pass;

 private:
  using Function = void (*)(const TileDecoder&, int64_t first, int count, float* values);
  Wire wire_;
  Message parts_;
  float limit_;
  const std::byte* message_;
  Function decode_;
};

}  // namespace tandem::codec
