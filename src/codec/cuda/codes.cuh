// Codes of a thread: 32, as bytes of eight words; packing to and from the planes of a message
// (codec/planes.h), and conversion to values.
//
// 8 bits: word j has the codes of i = 0 ... 3. Fewer bits: word 2 i + j % 2 has those of its j in
// increasing order, so that planes are packed four codes at a time.
#pragma once

#include <cuda_fp8.h>

#include "codec/cuda/block_memory.cuh"

namespace tandem::gpu {

constexpr int kCodeWords = kLaneValues / 4;

/// Index of the element whose code is byte `at` of word `word`.
template <int kBits>
constexpr int element_at(int word, int at) {
  return kBits == 8 ? 4 * word + at : 4 * (2 * at + word % 2) + word / 2;
}

/// Lowest bytes of four words.
__device__ inline uint32_t low_bytes(uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  return __byte_perm(__byte_perm(a, b, 0x0040), __byte_perm(c, d, 0x0040), 0x5410);
}

/// Transposes over four threads: words[k] of thread l becomes words[l] of thread k.
__device__ inline void transpose(uint32_t* words, int lane) {
#pragma unroll
  for (int bit = 1; bit < kQuad; bit *= 2) {
    const bool upper = lane & bit;
#pragma unroll
    for (int k = 0; k < kQuad; ++k) {
      if (k & bit) continue;
      const uint32_t given = upper ? words[k] : words[k | bit];
      const uint32_t got = __shfl_xor_sync(kAllLanes, given, bit);
      (upper ? words[k] : words[k | bit]) = got;
    }
  }
}

/// One plane of a block: bits [kFrom, kFrom + kBits) of each code.
template <int kBits, int kFrom>
struct Plane {
  static constexpr int kWords = kBits == 8 ? 8 : kBits == 4 ? 4 : kBits == 2 ? 2 : 1;
  static constexpr uint32_t kEven = 0x01010101u * ((1u << kBits) - 1u);
  uint32_t words[kWords];

  __device__ void pack(const uint32_t (&codes)[kCodeWords], int lane) {
    if constexpr (kBits == 8) {
#pragma unroll
      for (int w = 0; w < kWords; ++w) words[w] = codes[w];
      transpose(words, lane), transpose(words + 4, lane);
    } else {
      uint32_t pairs[4];  // by i: byte k has the codes of j = 2 k and 2 k + 1
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint32_t odd = kFrom < kBits ? codes[2 * i + 1] << (kBits - kFrom) : codes[2 * i + 1];
        pairs[i] = ((codes[2 * i] >> kFrom) & kEven) | (odd & (kEven << kBits));
        if constexpr (kBits == 2) pairs[i] |= pairs[i] >> 4;  // result in bytes 0 and 2
        if constexpr (kBits == 1) pairs[i] *= 0x01041040u;    // result in byte 3
      }
      if constexpr (kBits == 4) {
#pragma unroll
        for (int w = 0; w < kWords; ++w) words[w] = pairs[w];
      }
      if constexpr (kBits == 2) {
        words[0] = __byte_perm(pairs[0], pairs[1], 0x6420);
        words[1] = __byte_perm(pairs[2], pairs[3], 0x6420);
      }
      if constexpr (kBits == 1) {
        words[0] = __byte_perm(__byte_perm(pairs[0], pairs[1], 0x0073),
                               __byte_perm(pairs[2], pairs[3], 0x0073), 0x5410);
      }
    }
  }
  /// ORs this plane's bits into `codes`.
  __device__ void unpack(uint32_t (&codes)[kCodeWords], int lane) {
    if constexpr (kBits == 8) {
      transpose(words, lane), transpose(words + 4, lane);
#pragma unroll
      for (int w = 0; w < kWords; ++w) codes[w] = words[w];
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        uint32_t even, odd;  // codes in the lowest bits of each byte
        if constexpr (kBits == 4) even = words[i], odd = words[i] >> 4;
        if constexpr (kBits == 2) {
          const uint32_t twice = __byte_perm(words[i / 2], 0, i % 2 ? 0x3322 : 0x1100);
          even = (twice & 0x00ff00ffu) | ((twice >> 4) & 0xff00ff00u);
          odd = even >> 2;
        }
        if constexpr (kBits == 1) {
          // Bit 2 k of a byte becomes bit 8 k; carries do not reach those bits.
          const uint32_t byte = words[0] >> (8 * i);
          even = (byte & 0x55u) * 0x00041041u;
          odd = ((byte >> 1) & 0x55u) * 0x00041041u;
        }
        codes[2 * i] |= (even & kEven) << kFrom;
        codes[2 * i + 1] |= (odd & kEven) << kFrom;
      }
    }
  }
  __device__ void store(std::byte* plane, int64_t block, int lane) const {
    std::byte* to = plane + block * (kWireBlock / 8 * kBits);
    if constexpr (kWords >= 4) {
#pragma unroll
      for (int w = 0; w < kWords; w += 4) {
        *reinterpret_cast<uint4*>(to + 16 * w + 16 * lane) =
            make_uint4(words[w], words[w + 1], words[w + 2], words[w + 3]);
      }
    } else if constexpr (kWords == 2) {
      *reinterpret_cast<uint2*>(to + 8 * lane) = make_uint2(words[0], words[1]);
    } else {
      *reinterpret_cast<uint32_t*>(to + 4 * lane) = words[0];
    }
  }
  /// Loads data that another GPU may have stored: bypasses this SM's L1 cache.
  __device__ void load(const std::byte* plane, int64_t block, int lane) {
    const std::byte* from = plane + block * (kWireBlock / 8 * kBits);
    if constexpr (kWords >= 4) {
#pragma unroll
      for (int w = 0; w < kWords; w += 4) {
        const uint4 four = __ldcg(reinterpret_cast<const uint4*>(from + 16 * w + 16 * lane));
        words[w] = four.x, words[w + 1] = four.y, words[w + 2] = four.z, words[w + 3] = four.w;
      }
    } else if constexpr (kWords == 2) {
      const uint2 two = __ldcg(reinterpret_cast<const uint2*>(from + 8 * lane));
      words[0] = two.x, words[1] = two.y;
    } else {
      words[0] = __ldcg(reinterpret_cast<const uint32_t*>(from + 4 * lane));
    }
  }
};

template <typename Format>
concept IsLevels = requires {
  Format::levels;
};
template <typename Format>
concept IsSmallFloat = requires {
  Format::quantum;
};

/// Word whose lowest byte is the code of `t`; `t` must be in Format's range.
template <typename Format>
__device__ uint32_t code_byte(float t) {
  if constexpr (IsSmallFloat<Format>) {
    // Adding 2^23 times a code's unit at t's exponent rounds t to a multiple of that unit.
    constexpr int kMantissa = 23 - Format::shift;
    constexpr uint32_t kMin = std::bit_cast<uint32_t>(Format::min_normal);
    const uint32_t bits = codec::bits_of(t), local = bits & 0x7f800000u;
    const uint32_t exponent = local > kMin ? local : kMin;
    const float many = codec::float_of<float>(exponent + (uint32_t(Format::shift) << 23));
    const uint32_t steps = codec::bits_of(__fadd_rn(fabsf(t), many));
    return (steps + (exponent >> Format::shift) - (uint32_t(128 - Format::bias) << kMantissa)) |
           ((bits >> (32 - Format::bits)) & Format::sign);
  } else if constexpr (IsLevels<Format>) {
    return codec::bits_of(__fadd_rn(__fadd_rn(t, Format::maximum), 12582912.0f));
  } else {
    return codec::bits_of(__fadd_rn(t, 12582912.0f + float(Format::offset)));
  }
}

/// Codes of t(e), which must be in Format's range.
template <typename Format, typename Value>
__device__ void make_codes(const Value& t, uint32_t (&codes)[kCodeWords]) {
#pragma unroll
  for (int w = 0; w < kCodeWords; ++w) {
    const auto at = [&](int byte) { return t(element_at<Format::bits>(w, byte)); };
    if constexpr (std::is_same_v<Format, codec::E4M3> || std::is_same_v<Format, codec::E5M2>) {
      constexpr auto kKind = std::is_same_v<Format, codec::E5M2> ? __NV_E5M2 : __NV_E4M3;
      const auto two = [&](int byte) {
        const float2 both = make_float2(at(byte), at(byte + 1));
        return uint32_t(__nv_cvt_float2_to_fp8x2(both, __NV_SATFINITE, kKind));
      };
      codes[w] = __byte_perm(two(0), two(2), 0x5410);
    } else {
      codes[w] = low_bytes(code_byte<Format>(at(0)), code_byte<Format>(at(1)),
                           code_byte<Format>(at(2)), code_byte<Format>(at(3)));
    }
  }
}

/// Calls `with(e, value)` for every code, with Format::value of it.
template <typename Format, typename With>
__device__ void for_values(const uint32_t (&codes)[kCodeWords], const With& with) {
#pragma unroll
  for (int w = 0; w < kCodeWords; ++w) {
    uint32_t word = codes[w];
    if constexpr (IsSmallFloat<Format>)
      word <<= 8 - Format::bits;  // move signs to the bytes' top
                                  // bits
#pragma unroll
    for (int byte = 0; byte < 4; ++byte) {
      float value;
      if constexpr (IsSmallFloat<Format>) {
        constexpr int kExponent = Format::bits - 1 - (23 - Format::shift);
        constexpr uint32_t kMask = 0x80000000u | (Format::sign - 1u) << Format::shift;
        const auto top = int32_t(__byte_perm(word, 0, uint32_t(byte) << 12 | 0x444));
        value = __fmul_rn(codec::float_of<float>(uint32_t(top >> (8 - kExponent)) & kMask),
                          std::bit_cast<float>(uint32_t(254 - Format::bias) << 23));
      } else {
        const float above =  // 2^23 + code
            codec::float_of<float>(__byte_perm(word, 0x4b000000u, 0x7440u | uint32_t(byte)));
        if constexpr (IsLevels<Format>) {
          value = __fmaf_rn(__fadd_rn(above, -8388608.0f), 2.0f, -float(Format::levels));
        } else {
          value = __fadd_rn(above, -(8388608.0f + float(Format::offset)));
        }
      }
      with(element_at<Format::bits>(w, byte), value);
    }
  }
}

}  // namespace tandem::gpu
