#include "engine/parallel/sync/exchange.h"

#include <algorithm>
#include <cstring>

#include "codec/whole.h"
#include "engine/parallel/sync/demo.h"
#include "engine/parallel/sync/sparse_exchange.h"
#include "tandem/codec.h"

namespace tandem {
namespace {

constexpr size_t kAlignment = 16;

constexpr size_t aligned(size_t bytes) {
  return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

/// All changes in a wire format. Consecutive slices that are encoded are one message of it,
/// preceded by 16 bytes that hold its length; all others are sent in f32.
class Dense : public Exchange {
 public:
  explicit Dense(const Wire& wire) : wire_(wire) {
    if (!wire.is_none()) codec::require_encodable(wire, DType::f32);
  }

  size_t max_bytes(const SyncShard& shard) const override {
    size_t bytes = 0;
    for_each(shard, [&](int64_t, int64_t count, bool encoded) {
      bytes += encoded ? kAlignment + aligned(wire_.bytes(count, DType::f32)) : raw_bytes(count);
    });
    return bytes;
  }

  size_t encode(const SyncShard& shard, const Tensor& changes, const Tensor&,
                std::byte* message) override {
    std::byte* to = message;
    size_t used = 0;
    for_each(shard, [&](int64_t begin, int64_t count, bool encoded) {
      const size_t bytes = encode(changes.as<const float>() + begin, count, encoded, to);
      used = size_t(to - message) + bytes;
      to += aligned(bytes);
    });
    return used;
  }

  void combine(const SyncShard& shard, std::span<const std::byte* const> messages,
               const Tensor& mean) const override {
    auto* const sum = mean.as<float>();
    std::fill_n(sum, mean.elements(), 0.0f);
    std::vector<float> decoded;
    for (const std::byte* from : messages) {
      for_each(shard, [&](int64_t begin, int64_t count, bool encoded) {
        decoded.resize(size_t(count));
        from += decode(from, encoded, decoded.data(), count);
        for (int64_t i = 0; i < count; ++i) sum[begin + i] += decoded[size_t(i)];
      });
    }
    for (int64_t i = 0; i < mean.elements(); ++i) sum[i] /= float(messages.size());
  }

 private:
  static size_t raw_bytes(int64_t count) { return aligned(size_t(count) * sizeof(float)); }

  /// Returns the bytes used.
  size_t encode(const float* from, int64_t count, bool encoded, std::byte* to) const {
    if (!encoded) {
      std::memcpy(to, from, size_t(count) * sizeof(float));
      return size_t(count) * sizeof(float);
    }
    const uint64_t bytes = codec::encode_whole(wire_, DType::f32, from, count, to + kAlignment);
    std::memset(to, 0, kAlignment);
    std::memcpy(to, &bytes, sizeof bytes);
    return kAlignment + bytes;
  }

  /// Returns the bytes read.
  size_t decode(const std::byte* message, bool encoded, float* values, int64_t count) const {
    if (!encoded) {
      std::memcpy(values, message, size_t(count) * sizeof(float));
      return raw_bytes(count);
    }
    uint64_t bytes = 0;
    std::memcpy(&bytes, message, sizeof bytes);
    codec::decode_whole(wire_, {message + kAlignment, bytes}, DType::f32, values, count);
    return kAlignment + aligned(bytes);
  }

  /// Calls visit(begin, count, encoded) for the segments of a message.
  template <typename Visit>
  void for_each(const SyncShard& shard, Visit&& visit) const {
    for (size_t i = 0; i < shard.slices.size();) {
      const bool encoded = !wire_.is_none() && shard.slices[i].sharded;
      const int64_t begin = shard.slices[i].begin;
      int64_t end = begin;
      for (; i < shard.slices.size(); ++i) {
        if ((!wire_.is_none() && shard.slices[i].sharded) != encoded) break;
        end = shard.slices[i].begin + shard.slices[i].count;
      }
      visit(begin, end - begin, encoded);
    }
  }

  Wire wire_;
};

}  // namespace

std::unique_ptr<Exchange> make_exchange(const SyncConfig& config) {
  if (config.is_demo()) return make_demo_exchange(config);
  if (config.is_sparse()) return make_sparse_exchange(config.sparse(), config.decay());
  return std::make_unique<Dense>(Wire::parse(config.codec));
}

}  // namespace tandem
