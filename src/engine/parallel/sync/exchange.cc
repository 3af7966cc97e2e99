#include "engine/parallel/sync/exchange.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "codec/enqueue.h"
#include "codec/whole.h"
#include "engine/parallel/sync/demo.h"
#include "engine/parallel/sync/sparse_exchange.h"
#include "kernels/elementwise.h"
#include "kernels/outer_step.h"

namespace tandem {
namespace {

constexpr size_t kAlignment = 16;

constexpr size_t aligned(size_t bytes) {
  return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

/// All changes in a wire format. Consecutive slices that are encoded are one message of it; all
/// others are sent in f32. Messages of an exact wire format, whose sizes vary, are preceded by 16
/// bytes that hold their length: CPU ranks.
class Dense : public Exchange {
 public:
  Dense(const Wire& wire, const Exec& exec)
      : exec_(exec), wire_(wire), length_bytes_(wire.is_exact() ? kAlignment : 0) {
    if (!wire.is_none()) codec::require_encodable(wire, DType::f32);
  }

  size_t scratch_bytes(const SyncShard& shard) const override {
    int64_t largest = 0;
    for_each(shard, [&](int64_t, int64_t count, bool encoded) {
      if (encoded) largest = std::max(largest, count);
    });
    return size_t(largest) * sizeof(float);
  }

  void prepare(const SyncShard& shard) override {
    const size_t bytes = scratch_bytes(shard);
    if (bytes > decoded_.bytes()) decoded_ = Memory(bytes, exec_.device);
  }

  size_t bytes() const override { return decoded_.bytes(); }

  size_t max_bytes(const SyncShard& shard) const override {
    size_t bytes = 0;
    for_each(shard, [&](int64_t, int64_t count, bool encoded) {
      bytes += encoded ? length_bytes_ + aligned(wire_.bytes(count, DType::f32)) : raw_bytes(count);
    });
    return bytes;
  }

  size_t encode(const SyncShard& shard, const Tensor& changes, const Tensor&,
                std::byte* message) override {
    std::byte* to = message;
    size_t used = 0;
    for_each(shard, [&](int64_t begin, int64_t count, bool encoded) {
      const size_t bytes = encode(changes.narrow(0, begin, count), encoded, to);
      used = size_t(to - message) + bytes;
      to += aligned(bytes);
    });
    return used;
  }

  void combine(const SyncShard& shard, std::span<const std::byte* const> messages,
               const Tensor& mean) const override {
    for (const std::byte* const& message : messages) {
      const bool is_first = &message == messages.data();
      const std::byte* from = message;
      for_each(shard, [&](int64_t begin, int64_t count, bool encoded) {
        const Tensor to = mean.narrow(0, begin, count);
        if (!encoded) {
          const Tensor values(from, DType::f32, {count}, exec_.device);
          is_first ? copy(exec_, values, to) : sum(exec_, std::array{to, values}, to);
        } else if (is_first) {
          decode(from, to);
        } else {
          const Tensor values = decoded_.view(DType::f32, {count});
          decode(from, values);
          sum(exec_, std::array{to, values}, to);
        }
        from += encoded ? encoded_bytes(from, count) : raw_bytes(count);
      });
    }
    if (messages.size() > 1) divide(exec_, mean, float(messages.size()));
  }

 private:
  static size_t raw_bytes(int64_t count) { return aligned(size_t(count) * sizeof(float)); }

  /// Returns the bytes used.
  size_t encode(const Tensor& values, bool encoded, std::byte* to) const {
    if (!encoded) {
      copy(exec_, values, Tensor(to, DType::f32, {values.elements()}, exec_.device));
      return values.bytes();
    }
    const uint64_t bytes = enqueue_encode(exec_, wire_, values, to + length_bytes_);
    if (length_bytes_ > 0) {
      std::memset(to, 0, length_bytes_);
      std::memcpy(to, &bytes, sizeof bytes);
    }
    return length_bytes_ + bytes;
  }

  /// Bytes of an encoded message of `count` changes, without its length.
  size_t coded_bytes(const std::byte* message, int64_t count) const {
    if (length_bytes_ == 0) return wire_.bytes(count, DType::f32);
    uint64_t bytes = 0;
    std::memcpy(&bytes, message, sizeof bytes);
    return bytes;
  }
  size_t encoded_bytes(const std::byte* message, int64_t count) const {
    return length_bytes_ + aligned(coded_bytes(message, count));
  }

  void decode(const std::byte* message, const Tensor& values) const {
    const size_t bytes = coded_bytes(message, values.elements());
    enqueue_decode(exec_, wire_, {message + length_bytes_, bytes}, values);
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

  const Exec exec_;
  const Wire wire_;
  const size_t length_bytes_;
  Memory decoded_;  // a segment of a message
};

}  // namespace

std::unique_ptr<Exchange> make_exchange(const SyncConfig& config, const Exec& exec) {
  if (config.is_demo()) return make_demo_exchange(config, exec);
  if (config.is_sparse()) return make_sparse_exchange(config.sparse(), config.decay(), exec);
  return std::make_unique<Dense>(Wire::parse(config.codec), exec);
}

}  // namespace tandem
