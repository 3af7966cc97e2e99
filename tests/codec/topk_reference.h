// Reference implementation of sparse messages (codec/topk.h): by sorting, a bit at a time.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <vector>

#include "codec/topk.h"
#include "codec/topk_levels.h"

namespace tandem::test {

struct SparseReference {
  codec::TopK topk;

  /// Indices that a chunk sends, in order.
  std::vector<int> chosen(const float* x, int count) const {
    std::vector<int> order(static_cast<size_t>(count));
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(),
                     [&](int a, int b) { return magnitude(x[a]) > magnitude(x[b]); });
    const int sent = (topk.k * count + topk.chunk - 1) / topk.chunk;
    order.resize(size_t(sent));
    std::sort(order.begin(), order.end());
    return order;
  }

  /// Message of `error`, which is left with what is not sent.
  std::vector<std::byte> encode(std::vector<float>& error) const {
    std::vector<std::byte> message;
    for (size_t first = 0; first < error.size(); first += size_t(topk.chunk)) {
      const int count = int(std::min(error.size() - first, size_t(topk.chunk)));
      float* x = &error[first];
      const auto indices = chosen(x, count);
      uint32_t smallest = ~0u, largest = 0;
      for (const int i : indices) {
        smallest = std::min(smallest, magnitude(x[i]));
        largest = std::max(largest, magnitude(x[i]));
      }
      const auto levels = codec::TopKLevels::of(smallest, largest, topk.bits);
      std::vector<bool> bits;
      const auto put = [&](uint32_t field, int width) {
        for (int b = 0; b < width; ++b) bits.push_back(field >> b & 1);
      };
      put(levels.stored(), 32);
      for (const int i : indices) {
        const uint32_t code = levels.code(x[i], topk.bits);
        put(uint32_t(i), 12);
        put(code, topk.bits);
        x[i] -= levels.value(code, topk.bits);
        if (!std::isfinite(x[i])) x[i] = 0;
      }
      while (bits.size() % 32 != 0) bits.push_back(false);
      for (size_t b = 0; b < bits.size(); b += 8) {
        unsigned byte = 0;
        for (size_t k = 0; k < 8; ++k) byte |= unsigned(bits[b + k]) << k;
        message.push_back(std::byte(byte));
      }
    }
    return message;
  }

  struct Entry {
    int64_t index;
    float value;
  };
  std::vector<Entry> decode(const std::vector<std::byte>& message, int64_t elements) const {
    std::vector<Entry> all;
    size_t bit = 0;
    const auto get = [&](int width) {
      uint32_t field = 0;
      for (int b = 0; b < width; ++b, ++bit) {
        field |= (uint32_t(message.at(bit / 8)) >> (bit % 8) & 1) << b;
      }
      return field;
    };
    for (int64_t first = 0; first < elements; first += topk.chunk) {
      const int count = int(std::min<int64_t>(elements - first, topk.chunk));
      const auto levels = codec::TopKLevels::from_stored(get(32));
      for (int n = (topk.k * count + topk.chunk - 1) / topk.chunk; n > 0; --n) {
        const uint32_t index = get(12);
        all.push_back({first + index, levels.value(get(topk.bits), topk.bits)});
      }
      bit = (bit + 31) / 32 * 32;
    }
    return all;
  }

  static uint32_t magnitude(float x) { return codec::bits_of(x) & 0x7fffffffu; }
};

}  // namespace tandem::test
