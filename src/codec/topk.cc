#include "codec/topk.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <functional>

#include "codec/lanes.h"
#include "codec/topk_levels.h"
#include "core/cpu/parallel.h"
#include "core/float_operand.h"
#include "tandem/error.h"

namespace tandem::codec {
namespace {

constexpr int64_t kMinChunks = 16;  ///< per thread

static_assert(std::endian::native == std::endian::little);

/// Magnitudes of a chunk as words, whose order is that of the magnitudes; zeros up to a whole
/// vector.
struct alignas(64) Magnitudes {
  uint32_t word[kMaxTopKChunk];
  int count = 0;
  uint32_t largest = 0;

  /// error = beta * error + delta.
  void accumulate(float beta, const float* delta, int n, float* error) {
    count = n;
    WordLanes maximum{};
    int i = 0;
    for (; i + kLanes <= n; i += kLanes) {
      const FloatLanes e = load_floats(error + i) * beta + load_floats(delta + i);
      store_floats(error + i, e);
      const WordLanes words = bits_of(e) & 0x7fffffffu;
      store(word + i, words);
      maximum = larger(maximum, words);
    }
    largest = largest_lane(maximum);
    const int padded = (n + kLanes - 1) / kLanes * kLanes;
    for (; i < padded; ++i) {
      if (i < n) error[i] = error[i] * beta + delta[i];
      word[i] = i < n ? bits_of(error[i]) & 0x7fffffffu : 0;
      largest = std::max(largest, word[i]);
    }
  }
  /// Magnitudes that are at least `threshold` > 0.
  int at_least(uint32_t threshold) const {
    WordLanes found{};
    for (int i = 0; i < count; i += kLanes) {
      found -= WordLanes(load<WordLanes>(word + i) >= threshold);
    }
    int sum = 0;
    for (int lane = 0; lane < kLanes; ++lane) sum += int(found[lane]);
    return sum;
  }
  /// Calls `with(i)` for each magnitude of at least `threshold`, by index.
  template <typename With>
  void for_each(uint32_t threshold, const With& with) const {
    for (int i = 0; i < count; i += kLanes) {
      if (largest_lane(load<WordLanes>(word + i)) < threshold) continue;
      for (int j = i; j < std::min(count, i + kLanes); ++j) {
        if (word[j] >= threshold) with(j);
      }
    }
  }
};

/// The k largest: all above `threshold`, and the first `ties` equal to it.
struct Selection {
  uint32_t threshold = 0;
  int ties = 0;
};

/// Searches downwards from the largest magnitude by 1, 2, 4, ... powers of two, then by halving,
/// until few candidates are left.
Selection select(const Magnitudes& magnitudes, int k) {
  const int enough = 2 * k + 32;
  uint32_t low = 0, high = magnitudes.largest + 1;  // at_least(low) >= k > at_least(high)
  int candidates = magnitudes.count, above = 0;
  for (uint64_t stride = 1u << 23; candidates > enough && high - low > 1;) {
    const bool gallops = low == 0 && high - low > stride;
    const uint32_t middle = gallops ? high - uint32_t(stride) : low + (high - low) / 2;
    const int found = magnitudes.at_least(middle);
    if (found >= k) {
      low = middle, candidates = found;
    } else {
      high = middle, above = found;
    }
    stride *= 2;
  }
  if (high - low == 1) return {low, k - above};
  uint32_t words[kMaxTopKChunk];
  int n = 0;
  magnitudes.for_each(low, [&](int i) { words[n++] = magnitudes.word[i]; });
  std::nth_element(words, words + k - 1, words + n, std::greater<>());
  const uint32_t threshold = words[k - 1];
  const auto larger_ones =
      std::count_if(words, words + k, [=](uint32_t word) { return word > threshold; });
  return {threshold, k - int(larger_ones)};
}

/// Writes fields of up to 32 bits to consecutive words.
class BitWriter {
 public:
  explicit BitWriter(std::byte* to) : to_(to) {}
  void put(uint32_t field, int bits) {
    pending_ |= uint64_t(field) << used_;
    used_ += bits;
    if (used_ >= 32) flush();
  }
  void finish() {
    if (used_ > 0) flush();
  }

 private:
  void flush() {
    const auto word = uint32_t(pending_);
    std::memcpy(to_, &word, sizeof word);
    to_ += sizeof word;
    pending_ >>= 32;
    used_ -= 32;
  }

  std::byte* to_;
  uint64_t pending_ = 0;
  int used_ = 0;
};

void encode_chunk(const TopK& topk, float beta, const float* delta, int count, float* error,
                  std::byte* record) {
  Magnitudes magnitudes;
  magnitudes.accumulate(beta, delta, count, error);
  Selection chosen = select(magnitudes, topk.sent(count));
  const auto levels = TopKLevels::of(chosen.threshold, magnitudes.largest, topk.bits);
  BitWriter writer(record);
  writer.put(levels.stored(), 32);
  magnitudes.for_each(chosen.threshold, [&](int i) {
    if (magnitudes.word[i] == chosen.threshold && chosen.ties-- <= 0) return;
    const uint32_t code = levels.code(error[i], topk.bits);
    writer.put(uint32_t(i) | code << kTopKIndexBits, kTopKIndexBits + topk.bits);
    const float rest = error[i] - levels.value(code, topk.bits);
    error[i] = std::fabs(rest) <= largest_of(DType::f32) ? rest : 0;
  });
  writer.finish();
}

/// Calls `with(index, value)` for each value of a record that is inside its chunk.
template <typename With>
void for_each_sent(const TopK& topk, const std::byte* record, int count, const With& with) {
  uint32_t word;
  std::memcpy(&word, record, sizeof word);
  const auto levels = TopKLevels::from_stored(word);
  uint64_t pending = 0;
  int left = 0;
  for (int n = topk.sent(count); n > 0; --n) {
    if (left < kTopKIndexBits + topk.bits) {
      record += sizeof word;
      std::memcpy(&word, record, sizeof word);
      pending |= uint64_t(word) << left;
      left += 32;
    }
    const auto index = int(pending & ((1u << kTopKIndexBits) - 1));
    const auto code = uint32_t(pending >> kTopKIndexBits) & ((1u << topk.bits) - 1);
    pending >>= kTopKIndexBits + topk.bits;
    left -= kTopKIndexBits + topk.bits;
    if (index < count) with(index, levels.value(code, topk.bits));
  }
}

/// `record`: where the chunk's is in each message.
void mean_chunk(const TopK& topk, std::span<const std::byte* const> messages, int64_t record,
                TopKMean mean, int count, float* values) {
  int32_t senders[kMaxTopKChunk] = {};
  std::fill_n(values, count, 0.0f);
  for (const std::byte* message : messages) {
    for_each_sent(topk, message + record, count, [&](int i, float value) {
      values[i] += value;
      ++senders[i];
    });
  }
  for (int i = 0; i < count; ++i) {
    const int divisor = mean == TopKMean::ranks ? int(messages.size()) : std::max(senders[i], 1);
    values[i] /= float(divisor);
  }
}

}  // namespace

void TopK::check() const {
  const auto require = [](const char* name, int value, int minimum, int maximum) {
    if (value >= minimum && value <= maximum) return;
    throw InvalidArgument(
        fmt::format("topk: {} {}: expected {} to {}", name, value, minimum, maximum));
  };
  require("chunk", chunk, 1, kMaxTopKChunk);
  require("k", k, 1, chunk);
  require("bits", bits, 2, 8);
}

void encode_topk(const Exec& exec, const TopK& topk, float beta, const Tensor& delta,
                 const Tensor& error, std::byte* message) {
  topk.check();
  const int64_t elements = delta.elements();
  require_floats(exec, "encode_topk", "delta", delta, elements);
  require_floats(exec, "encode_topk", "error", error, elements);
  if (exec.on_gpu()) return encode_topk_on_gpu(exec, topk, beta, delta, error, message);
  const int64_t chunks = topk.chunks(elements), record = 4 * topk.words(topk.chunk);
  cpu::parallel_ranges(chunks, kMinChunks, [&](int64_t begin, int64_t end) {
    for (int64_t c = begin; c < end; ++c) {
      encode_chunk(topk, beta, delta.as<const float>() + c * topk.chunk, topk.count_of(c, elements),
                   error.as<float>() + c * topk.chunk, message + c * record);
    }
  });
}

void mean_topk(const Exec& exec, const TopK& topk, std::span<const std::byte* const> messages,
               TopKMean mean, const Tensor& values) {
  topk.check();
  const int64_t elements = values.elements();
  require_floats(exec, "mean_topk", "values", values, elements);
  if (exec.on_gpu()) return mean_topk_on_gpu(exec, topk, messages, mean, values);
  const int64_t chunks = topk.chunks(elements), record = 4 * topk.words(topk.chunk);
  cpu::parallel_ranges(chunks, kMinChunks, [&](int64_t begin, int64_t end) {
    for (int64_t c = begin; c < end; ++c) {
      mean_chunk(topk, messages, c * record, mean, topk.count_of(c, elements),
                 values.as<float>() + c * topk.chunk);
    }
  });
}

}  // namespace tandem::codec
