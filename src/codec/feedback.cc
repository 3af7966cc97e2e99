#include "codec/feedback.h"

#include "codec/tiles.h"
#include "codec/whole.h"

namespace tandem::codec {

void widen_at(DType dtype, const std::byte* values, int64_t first, int count, float* to) {
  if (dtype == DType::f32) {
    widen(reinterpret_cast<const float*>(values) + first, count, to);
  } else if (dtype == DType::bf16) {
    widen(reinterpret_cast<const BFloat16*>(values) + first, count, to);
  } else {
    widen(reinterpret_cast<const Float16*>(values) + first, count, to);
  }
}

void narrow_at(DType dtype, const float* from, int64_t first, int count, std::byte* values) {
  if (dtype == DType::f32) {
    narrow(from, count, reinterpret_cast<float*>(values) + first);
  } else if (dtype == DType::bf16) {
    narrow(from, count, reinterpret_cast<BFloat16*>(values) + first);
  } else {
    narrow(from, count, reinterpret_cast<Float16*>(values) + first);
  }
}

size_t encode_with_feedback(const Wire& wire, DType dtype, const void* values, int64_t elements,
                            float* residual, std::byte* message) {
  if (!residual || wire.is_exact()) return encode_whole(wire, dtype, values, elements, message);
  const TileEncoder encoder(wire, elements, largest_of(dtype), message);
  const TileDecoder decoder(wire, elements, largest_of(dtype), message);
  alignas(64) float sent[kTile], decoded[kTile];
  for_tiles(elements, [&](int64_t first, int count) {
    widen_at(dtype, static_cast<const std::byte*>(values), first, count, sent);
    add(residual + first, count, sent);
    fill_up(sent, count);
    encoder.put(first, count, sent);
    decoder.get(first, count, decoded);
    keep_error(sent, decoded, count, residual + first);
  });
  return wire.bytes(elements, dtype);
}

}  // namespace tandem::codec
