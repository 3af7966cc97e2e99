#include <fmt/format.h>

#include <cstring>

#include "codec/numbers.h"
#include "codec/tiles.h"
#include "codec/whole.h"
#include "codec/whole_codec.h"
#include "core/cpu/float_mode.h"
#include "tandem/error.h"

namespace tandem {

using namespace codec;

namespace codec {
namespace {

template <typename T>
void encode_as(const Wire& wire, const T* values, int64_t elements, std::byte* message) {
  const TileEncoder encoder(wire, elements, largest_of(dtype_of<T>()), message);
  alignas(64) float tile[kTile];
  for_tiles(elements, [&](int64_t first, int count) {
    if constexpr (std::same_as<T, float>) {
      if (count % kWireBlock == 0) return encoder.put(first, count, values + first);
    }
    widen(values + first, count, tile);
    encoder.put(first, count, tile);
  });
}

template <typename T>
void decode_as(const Wire& wire, const std::byte* message, T* values, int64_t elements) {
  const TileDecoder decoder(wire, elements, largest_of(dtype_of<T>()), message);
  alignas(64) float tile[kTile];
  for_tiles(elements, [&](int64_t first, int count) {
    if constexpr (std::same_as<T, float>) {
      if (count % kWireBlock == 0) return decoder.get(first, count, values + first);
    }
    decoder.get(first, count, tile);
    narrow(tile, count, values + first);
  });
}

}  // namespace

void require_encodable(const Wire& wire, DType dtype) {
  wire.check();
  if (const WholeCodec* whole = find_whole_codec(wire.codec)) return whole->require(dtype);
  if (wire.is_none() || dtype == DType::f32 || dtype == DType::bf16 || dtype == DType::f16) return;
  throw InvalidArgument(fmt::format("codec '{}': dtype {}: expected f32, bf16 or f16",
                                    wire.describe(), name_of(dtype)));
}

size_t encode_whole(const Wire& wire, DType dtype, const void* values, int64_t elements,
                    std::byte* message) {
  if (const WholeCodec* whole = find_whole_codec(wire.codec)) {
    return whole->encode(dtype, values, elements, message);
  }
  const size_t bytes = wire.bytes(elements, dtype);
  if (wire.is_none()) {
    if (bytes) std::memcpy(message, values, bytes);
  } else if (dtype == DType::f32) {
    encode_as(wire, static_cast<const float*>(values), elements, message);
  } else if (dtype == DType::bf16) {
    encode_as(wire, static_cast<const BFloat16*>(values), elements, message);
  } else {
    encode_as(wire, static_cast<const Float16*>(values), elements, message);
  }
  return bytes;
}

void decode_whole(const Wire& wire, std::span<const std::byte> message, DType dtype, void* values,
                  int64_t elements) {
  if (const WholeCodec* whole = find_whole_codec(wire.codec)) {
    return whole->decode(dtype, message, elements, values);
  }
  const size_t bytes = wire.bytes(elements, dtype);
  if (message.size() < bytes) {
    throw InvalidArgument(fmt::format("decode: {} bytes for {} elements as {}: expected {}",
                                      message.size(), elements, wire.describe(), bytes));
  }
  if (wire.is_none()) {
    if (bytes) std::memcpy(values, message.data(), bytes);
  } else if (dtype == DType::f32) {
    decode_as(wire, message.data(), static_cast<float*>(values), elements);
  } else if (dtype == DType::bf16) {
    decode_as(wire, message.data(), static_cast<BFloat16*>(values), elements);
  } else {
    decode_as(wire, message.data(), static_cast<Float16*>(values), elements);
  }
}

void require_host(const char* op, const Tensor& values) {
  if (values.contiguous() && values.device().kind == DeviceKind::cpu) return;
  throw InvalidArgument(fmt::format("{}: values {}: expected a contiguous tensor in host memory",
                                    op, values.describe()));
}

}  // namespace codec

size_t encode(const Wire& wire, const Tensor& values, std::span<std::byte> message) {
  const cpu::FloatMode mode;
  require_host("encode", values);
  require_encodable(wire, values.dtype());
  const size_t bytes = wire.bytes(values.elements(), values.dtype());
  if (message.size() < bytes) {
    throw InvalidArgument(fmt::format("encode: {} as {} into {} bytes: expected at least {}",
                                      values.describe(), wire.describe(), message.size(), bytes));
  }
  return encode_whole(wire, values.dtype(), values.data(), values.elements(), message.data());
}

void decode(const Wire& wire, std::span<const std::byte> message, const Tensor& values) {
  const cpu::FloatMode mode;
  require_host("decode", values);
  require_encodable(wire, values.dtype());
  if (values.read_only()) {
    throw InvalidArgument(
        fmt::format("decode: values {}: read-only: expected writable", values.describe()));
  }
  decode_whole(wire, message, values.dtype(), values.data(), values.elements());
}

}  // namespace tandem
