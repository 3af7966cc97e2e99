#include "codec/dither.h"

#include <fmt/format.h>

#include "codec/tiles.h"
#include "codec/whole.h"
#include "core/cpu/float_mode.h"
#include "tandem/error.h"

namespace tandem::codec {
namespace {

constexpr int kNumbers = 16;

/// Philox4x32-10 (tandem/random.h) of 16 indices at a time, in loops that vectorize.
struct PhiloxLanes {
  uint32_t word[4][kNumbers];

  PhiloxLanes(const Dither& dither, uint64_t index) {
    for (uint32_t i = 0; i < kNumbers; ++i) {
      word[0][i] = uint32_t(index) + i;  // index is a multiple of 16
      word[1][i] = uint32_t(index >> 32);
      word[2][i] = uint32_t(dither.stream);
      word[3][i] = uint32_t(dither.stream >> 32);
    }
    auto k0 = uint32_t(dither.seed), k1 = uint32_t(dither.seed >> 32);
    for (int round = 0; round < 10; ++round) {
#pragma omp simd
      for (int i = 0; i < kNumbers; ++i) {
        const uint64_t p0 = uint64_t(0xD2511F53u) * word[0][i];
        const uint64_t p1 = uint64_t(0xCD9E8D57u) * word[2][i];
        word[0][i] = uint32_t(p1 >> 32) ^ word[1][i] ^ k0;
        word[2][i] = uint32_t(p0 >> 32) ^ word[3][i] ^ k1;
        word[1][i] = uint32_t(p1);
        word[3][i] = uint32_t(p0);
      }
      k0 += 0x9E3779B9u;
      k1 += 0xBB67AE85u;
    }
  }
};

}  // namespace

void fill_noise(const Dither& dither, int64_t first, int count, float* noise) {
  for (int at = 0; at < count; at += kNoiseBlock, noise += kNoiseBlock) {
    const PhiloxLanes random(dither, uint64_t(first + at) / 4);
    for (int word = 0; word < 4; ++word) {
      for (int i = 0; i < kNumbers; ++i) {
        // Odd multiples of 2^-25: exact, symmetric and never a half.
        noise[word * kNumbers + i] =
            float(int(random.word[word][i] >> 8) * 2 - 0xffffff) * 0x1p-25f;
      }
    }
  }
}

size_t encode_dithered(const Wire& wire, const Tensor& values, const Dither& dither,
                       std::span<std::byte> message) {
  const cpu::FloatMode mode;
  require_host("encode_dithered", values);
  require_encodable(wire, values.dtype());
  if (!can_dither(wire)) {
    throw InvalidArgument(
        fmt::format("encode_dithered: codec '{}': expected int8 to int2, without spikes, and with "
                    "asym not log2",
                    wire.describe()));
  }
  if (values.dtype() != DType::f32) {
    throw InvalidArgument(
        fmt::format("encode_dithered: values {}: expected f32", values.describe()));
  }
  const size_t bytes = wire.bytes(values.elements(), values.dtype());
  if (message.size() < bytes) {
    throw InvalidArgument(
        fmt::format("encode_dithered: {} as {} into {} bytes: expected at least {}",
                    values.describe(), wire.describe(), message.size(), bytes));
  }
  const TileEncoder encoder(wire, values.elements(), largest_of(DType::f32), message.data(),
                            &dither);
  alignas(64) float tile[kTile];
  for_tiles(values.elements(), [&](int64_t first, int count) {
    widen(values.as<float>() + first, count, tile);
    encoder.put(first, count, tile);
  });
  return bytes;
}

}  // namespace tandem::codec
