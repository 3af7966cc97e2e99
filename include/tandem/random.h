// Counter-based random numbers (Philox4x32-10, Salmon et al., SC'11): the value at (seed, stream,
// index) is a pure function, so a tensor does not depend on rank count or order.
#pragma once

#include <array>
#include <cstdint>
#include <span>

#include "tandem/export.h"

TANDEM_API_BEGIN
namespace tandem {

/// Four independent 32-bit words for one (seed, stream, index).
constexpr std::array<uint32_t, 4> philox(uint64_t seed, uint64_t stream, uint64_t index) {
  std::array<uint32_t, 4> c{uint32_t(index), uint32_t(index >> 32), uint32_t(stream),
                            uint32_t(stream >> 32)};
  uint32_t k0 = uint32_t(seed), k1 = uint32_t(seed >> 32);
  for (int round = 0; round < 10; ++round) {
    const uint64_t p0 = uint64_t(0xD2511F53u) * c[0], p1 = uint64_t(0xCD9E8D57u) * c[2];
    c = {uint32_t(p1 >> 32) ^ c[1] ^ k0, uint32_t(p1), uint32_t(p0 >> 32) ^ c[3] ^ k1,
         uint32_t(p0)};
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return c;
}

/// Uniform in [0, 1), 24 bits.
constexpr float uniform(uint64_t seed, uint64_t stream, uint64_t index) {
  return float(philox(seed, stream, index)[0] >> 8) * 0x1p-24f;
}

/// Standard normal (Box-Muller on one counter).
float normal(uint64_t seed, uint64_t stream, uint64_t index);
/// values[i] = normal(seed, stream, first + i), several times as fast as one by one.
void fill_normal(std::span<float> values, uint64_t seed, uint64_t stream, uint64_t first = 0);

/// FNV-1a of a name: a stable stream id for a named tensor.
constexpr uint64_t stream_of(const char* name) {
  uint64_t hash = 0xcbf29ce484222325ull;
  for (; *name; ++name) hash = (hash ^ uint8_t(*name)) * 0x100000001b3ull;
  return hash;
}

}  // namespace tandem
TANDEM_API_END
