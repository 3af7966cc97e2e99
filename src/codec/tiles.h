// Encoding and decoding by tiles, in f32: a collective's data stays in the L1 cache between its
// decoding, sum and encoding.
#pragma once

#include "codec/message.h"
#include "codec/tile.h"

namespace tandem::codec {

struct Dither;

/// Writes one message of a grouped codec. Tiles (tile.h) may be passed in any order.
class TileEncoder {
 public:
  /// `message` has wire.bytes(elements) bytes. Decoded values are at most `limit`, the largest
  /// value of the tensor's dtype; a group beyond it becomes NaN.
  /// `dither`, which outlives the encoder: rounds integer codes stochastically (dither.h).
  TileEncoder(const Wire& wire, int64_t elements, float limit, std::byte* message,
              const Dither* dither = nullptr);
  /// `values`: `count`, padded to whole blocks (widen).
  void put(int64_t first, int count, const float* values) const;

  struct Pass;

 private:
  using Function = void (*)(const TileEncoder&, int64_t first, int count, const float* values);
  Wire wire_;
  Message layout_;
  float limit_;
  std::byte* message_;
  const Dither* dither_;
  Function encode_;
};

class TileDecoder {
 public:
  /// `limit` as for the encoder.
  TileDecoder(const Wire& wire, int64_t elements, float limit, const std::byte* message);
  /// Writes `count` values, plus the padding to whole blocks.
  void get(int64_t first, int count, float* values) const;

  struct Pass;

 private:
  using Function = void (*)(const TileDecoder&, int64_t first, int count, float* values);
  Wire wire_;
  Message layout_;
  float limit_;
  const std::byte* message_;
  Function decode_;
};

}  // namespace tandem::codec
