#include "codec/lossless.h"

#include <fmt/format.h>

#include <cstring>

#include "codec/planes.h"
#include "codec/tile.h"
#include "tandem/error.h"

namespace tandem::codec {
namespace {

struct Header {
  uint32_t coded = 0, escapes = 0, unused[2] = {};
};
static_assert(sizeof(Header) == 16);

constexpr int kHalves = 2 * kLanes, kPairs = kWireBlock / kHalves;
using Halves = uint16_t __attribute__((vector_size(2 * kHalves)));
using Bytes = uint8_t __attribute__((vector_size(kHalves)));
using SixteenHalves = uint16_t __attribute__((vector_size(32)));

Halves exponents_of(const uint16_t* halves) {
  return (load<Halves>(halves) >> 7) & 0xff;
}

uint32_t top_of(const uint16_t* halves, int blocks) {
  Halves top{};
  for (int i = 0; i < blocks * kWireBlock; i += kHalves) {
    const Halves exponents = exponents_of(halves + i);
    top = larger(top, exponents == 255 ? Halves{} : exponents);
  }
  uint16_t lanes[kHalves];
  store(lanes, top);
  return *std::max_element(lanes, lanes + kHalves);
}

bool is_any(const Halves& flags) {
  uint64_t words[sizeof flags / 8], any = 0;
  store(words, flags);
  for (const uint64_t word : words) any |= word;
  return any != 0;
}

/// Codes of a block; returns whether any escapes.
bool code_block(const uint16_t* halves, uint16_t top, Halves* codes) {
  Halves maximum{};
  for (int j = 0; j < kPairs; ++j) {
    const Halves exponents = exponents_of(halves + kHalves * j);
    const Halves below = top - exponents;
    const Halves near = below < uint16_t(kZeroExponent) ? below : Halves{} + uint16_t(kEscape);
    codes[j] = exponents == 0 ? Halves{} + uint16_t(kZeroExponent) : near;
    maximum |= codes[j] == uint16_t(kEscape);
  }
  return is_any(maximum);
}

/// 4-bit packing of planes.h: the first 64 elements in the lower halves of the words, the others in
/// the upper ones.
void pack_codes(const Halves* codes, std::byte* to) {
  SixteenHalves all[kWireBlock / 16];
  std::memcpy(all, codes, sizeof all);
  const SixteenHalves low = all[0] | all[1] << 4 | all[2] << 8 | all[3] << 12;
  const SixteenHalves high = all[4] | all[5] << 4 | all[6] << 8 | all[7] << 12;
  store(to,
        __builtin_shufflevector(low, high, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23));
  store(to + 32, __builtin_shufflevector(low, high, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29,
                                         14, 30, 15, 31));
}

void unpack_codes(const std::byte* from, Halves* codes) {
  const auto first = load<SixteenHalves>(from), second = load<SixteenHalves>(from + 32);
  const SixteenHalves low = __builtin_shufflevector(first, second, 0, 2, 4, 6, 8, 10, 12, 14, 16,
                                                    18, 20, 22, 24, 26, 28, 30);
  const SixteenHalves high = __builtin_shufflevector(first, second, 1, 3, 5, 7, 9, 11, 13, 15, 17,
                                                     19, 21, 23, 25, 27, 29, 31);
  SixteenHalves all[kWireBlock / 16];
  for (int j = 0; j < 4; ++j) {
    all[j] = (low >> (4 * j)) & 15;
    all[4 + j] = (high >> (4 * j)) & 15;
  }
  std::memcpy(codes, all, sizeof all);
}

void write_bytes(const uint16_t* halves, std::byte* to) {
  for (int i = 0; i < kWireBlock; i += kHalves) {
    const auto all = load<Halves>(halves + i);
    store(to + i, __builtin_convertvector((all & 0x7f) | ((all >> 8) & 0x80), Bytes));
  }
}

class LosslessEncoder {
 public:
  LosslessEncoder(DType dtype, int64_t elements, std::byte* message)
      : layout_(LosslessLayout::of(elements, dtype)),
        message_(message),
        room_(max_lossless_bytes(elements, dtype)) {
    if (!fits()) return;
    // Zero the padding between sections.
    for (const size_t end : {layout_.bytes, layout_.firsts, layout_.escapes}) {
      std::memset(message + end - 16, 0, 16);
    }
  }

  /// Encodes a tile's upper halves, padded to whole blocks. Returns false if there are too many
  /// escapes.
  bool put(int64_t first, int count, const uint16_t* halves) {
    const int blocks = (count + kWireBlock - 1) / kWireBlock;
    constexpr int kBlocks = kLosslessGroup / kWireBlock;
    for (int begin = 0; begin < blocks; begin += kBlocks) {
      const int64_t group = first / kLosslessGroup + begin / kBlocks;
      const int in_group = std::min(kBlocks, blocks - begin);
      const uint32_t top = top_of(halves + begin * kWireBlock, in_group);
      message_[layout_.tops + size_t(group)] = std::byte(top);
      std::memcpy(message_ + layout_.firsts + 4 * size_t(group), &escapes_, 4);
      for (int b = begin; b < begin + in_group; ++b) {
        const int valid = std::min(kWireBlock, count - b * kWireBlock);
        if (!put_block(first / kWireBlock + b, halves + b * kWireBlock, top, valid)) return false;
      }
    }
    return true;
  }
  void put_low(int64_t first, int count, const uint16_t* halves) {
    std::memcpy(message_ + layout_.low + 2 * first, halves, 2 * size_t(count));
  }
  size_t finish() {
    const Header header{1, escapes_, {}};
    std::memcpy(message_, &header, sizeof header);
    return layout_.escapes + escapes_;
  }
  bool fits() const { return layout_.escapes + escapes_ <= room_; }

 private:
  bool put_block(int64_t block, const uint16_t* halves, uint32_t top, int valid) {
    Halves codes[kPairs];
    const bool escapes = code_block(halves, uint16_t(top), codes);
    pack_codes(codes, message_ + layout_.codes + block * (kWireBlock / 2));
    write_bytes(halves, message_ + layout_.bytes + block * kWireBlock);
    if (!escapes) return true;
    uint16_t all[kWireBlock];
    std::memcpy(all, codes, sizeof all);
    for (int i = 0; i < valid; ++i) {
      if (all[i] != kEscape) continue;
      if (layout_.escapes + escapes_ >= room_) return false;
      message_[layout_.escapes + escapes_++] = std::byte((halves[i] >> 7) & 0xff);
    }
    return true;
  }

  LosslessLayout layout_;
  std::byte* message_;
  size_t room_;
  uint32_t escapes_ = 0;
};

/// Extracts a tile's upper halves, the last one repeated up to the end of its block; for f32 also
/// the lower halves.
void split(DType dtype, const void* values, int64_t first, int count, uint16_t* high,
           uint16_t* low) {
  if (dtype == DType::bf16) {
    std::memcpy(high, static_cast<const uint16_t*>(values) + first, 2 * size_t(count));
  } else {
    const auto* words = static_cast<const uint32_t*>(values) + first;
    for (int i = 0; i < count; ++i) {
      high[i] = uint16_t(words[i] >> 16);
      low[i] = uint16_t(words[i]);
    }
  }
  for (int i = count; i % kWireBlock != 0; ++i) high[i] = high[i - 1];
}

bool encode_coded(DType dtype, const void* values, int64_t elements, LosslessEncoder& encoder) {
  if (!encoder.fits()) return false;
  bool fits = true;
  for_tiles(elements, [&](int64_t first, int count) {
    if (!fits) return;
    uint16_t high[kTile], low[kTile];
    split(dtype, values, first, count, high, low);
    fits = encoder.put(first, count, high);
    if (dtype == DType::f32) encoder.put_low(first, count, low);
  });
  return fits;
}

class LosslessDecoder {
 public:
  LosslessDecoder(DType dtype, int64_t elements, uint32_t escapes, const std::byte* message)
      : layout_(LosslessLayout::of(elements, dtype)), message_(message), escapes_(escapes) {}

  void get(int64_t first, int count, uint16_t* halves) const {
    const int blocks = (count + kWireBlock - 1) / kWireBlock;
    uint32_t next = 0;
    for (int b = 0; b < blocks; ++b) {
      const int64_t block = first / kWireBlock + b, group = block * kWireBlock / kLosslessGroup;
      if (block * kWireBlock % kLosslessGroup == 0) {
        std::memcpy(&next, message_ + layout_.firsts + 4 * size_t(group), 4);
      }
      const auto top = uint32_t(message_[layout_.tops + size_t(group)]);
      get_block(block, top, std::min(kWireBlock, count - b * kWireBlock), next,
                halves + b * kWireBlock);
    }
  }
  const std::byte* low(int64_t first) const { return message_ + layout_.low + 2 * first; }

 private:
  void get_block(int64_t block, uint32_t top, int valid, uint32_t& next, uint16_t* halves) const {
    Halves codes[kPairs];
    unpack_codes(message_ + layout_.codes + block * (kWireBlock / 2), codes);
    Halves maximum{};
    for (int j = 0; j < kPairs; ++j) {
      const std::byte* from = message_ + layout_.bytes + block * kWireBlock + kHalves * j;
      const Halves rest = __builtin_convertvector(load<Bytes>(from), Halves);
      const Halves near = (uint16_t(top) - codes[j]) & 0xff;
      const Halves exponent = codes[j] == uint16_t(kZeroExponent) ? Halves{} : near;
      store(halves + kHalves * j, (rest & 0x80) << 8 | exponent << 7 | (rest & 0x7f));
      maximum |= codes[j] == uint16_t(kEscape);
    }
    if (!is_any(maximum)) return;
    uint16_t all[kWireBlock];
    std::memcpy(all, codes, sizeof all);
    for (int i = 0; i < valid; ++i) {
      if (all[i] != kEscape) continue;
      const uint32_t exponent = next < escapes_ ? uint32_t(message_[layout_.escapes + next]) : 0;
      ++next;
      halves[i] = uint16_t((halves[i] & 0x807f) | exponent << 7);
    }
  }

  LosslessLayout layout_;
  const std::byte* message_;
  uint32_t escapes_;
};

[[noreturn]] void refuse(size_t bytes, int64_t elements) {
  throw InvalidArgument(fmt::format(
      "decode: {} bytes are no lossless message of {} elements: expected what encode made", bytes,
      elements));
}

}  // namespace

double lossless_bits(DType dtype) {
  return (dtype == DType::f32 ? 28 : 12) + 8. * 5 / kLosslessGroup;
}

void require_lossless(DType dtype) {
  if (dtype == DType::bf16 || dtype == DType::f32) return;
  throw InvalidArgument(
      fmt::format("codec 'lossless': dtype {}: expected bf16 or f32", name_of(dtype)));
}

size_t encode_lossless(DType dtype, const void* values, int64_t elements, std::byte* message) {
  const size_t bytes = size_t(elements) * size_of(dtype);
  if (elements >= kMinCoded) {
    LosslessEncoder encoder(dtype, elements, message);
    if (encode_coded(dtype, values, elements, encoder)) return encoder.finish();
    const Header header;
    std::memcpy(message, &header, sizeof header);
    message += sizeof header;
  }
  if (bytes) std::memcpy(message, values, bytes);
  return max_lossless_bytes(elements, dtype);
}

void decode_lossless(DType dtype, std::span<const std::byte> message, int64_t elements,
                     void* values) {
  const size_t bytes = size_t(elements) * size_of(dtype);
  Header header;
  if (elements >= kMinCoded) {
    if (message.size() < sizeof header) refuse(message.size(), elements);
    std::memcpy(&header, message.data(), sizeof header);
  }
  if (header.coded == 0) {
    const size_t from = elements < kMinCoded ? 0 : sizeof header;
    if (message.size() - from < bytes) refuse(message.size(), elements);
    if (bytes) std::memcpy(values, message.data() + from, bytes);
    return;
  }
  const size_t fixed = LosslessLayout::of(elements, dtype).escapes;
  if (header.coded != 1 || message.size() < fixed || message.size() - fixed < header.escapes) {
    refuse(message.size(), elements);
  }
  const LosslessDecoder decoder(dtype, elements, header.escapes, message.data());
  for_tiles(elements, [&](int64_t first, int count) {
    uint16_t high[kTile];
    decoder.get(first, count, high);
    if (dtype == DType::bf16) {
      std::memcpy(static_cast<uint16_t*>(values) + first, high, 2 * size_t(count));
      return;
    }
    uint16_t low[kTile];
    std::memcpy(low, decoder.low(first), 2 * size_t(count));
    auto* words = static_cast<uint32_t*>(values) + first;
    for (int i = 0; i < count; ++i) words[i] = uint32_t(high[i]) << 16 | low[i];
  });
}

}  // namespace tandem::codec
