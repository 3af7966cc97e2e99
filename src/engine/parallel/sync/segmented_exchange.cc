#include "engine/parallel/sync/segmented_exchange.h"

#include <cstring>
#include <vector>

namespace tandem {
namespace {

/// Sets `mean` to the mean of messages in f32, at any place, added in order.
void mean_raw(std::span<const std::byte* const> messages, const Tensor& mean) {
  auto* const to = mean.as<float>();
  for (int64_t i = 0; i < mean.elements(); ++i) {
    float sum = 0;
    for (const std::byte* message : messages) {
      float value;
      std::memcpy(&value, message + size_t(i) * sizeof value, sizeof value);
      sum += value;
    }
    to[i] = sum / float(messages.size());
  }
}

}  // namespace

size_t SegmentedExchange::bytes(const Segment& segment) const {
  return segment.first.sharded ? segment_bytes(segment) : size_t(segment.count) * sizeof(float);
}

template <typename Visit>
void SegmentedExchange::for_each(const SyncShard& shard, const Visit& visit) const {
  for (size_t i = 0; i < shard.slices.size();) {
    Segment segment{shard.slices[i], shard.slices[i].count};
    for (++i; i < shard.slices.size(); ++i) {
      const SyncSlice& before = shard.slices[i - 1];
      const SyncSlice& next = shard.slices[i];
      if (next.sharded != before.sharded || (next.sharded && !continues(before, next))) break;
      segment.count += next.count;
    }
    visit(segment);
  }
}

size_t SegmentedExchange::max_bytes(const SyncShard& shard) const {
  size_t sum = 0;
  for_each(shard, [&](const Segment& segment) { sum += bytes(segment); });
  return sum;
}

size_t SegmentedExchange::encode(const SyncShard& shard, const Tensor& changes,
                                 const Tensor& unsent, std::byte* message) {
  std::byte* to = message;
  for_each(shard, [&](const Segment& segment) {
    const int64_t begin = segment.first.begin;
    const Tensor values = changes.narrow(0, begin, segment.count);
    if (segment.first.sharded) {
      encode_segment(segment, values, unsent.narrow(0, begin, segment.count), to);
    } else {
      std::memcpy(to, values.as<const float>(), values.bytes());
    }
    to += bytes(segment);
  });
  return size_t(to - message);
}

void SegmentedExchange::combine(const SyncShard& shard, std::span<const std::byte* const> messages,
                                const Tensor& mean) const {
  std::vector<const std::byte*> from(messages.begin(), messages.end());
  for_each(shard, [&](const Segment& segment) {
    const Tensor values = mean.narrow(0, segment.first.begin, segment.count);
    segment.first.sharded ? combine_segment(segment, from, values) : mean_raw(from, values);
    for (const std::byte*& message : from) message += bytes(segment);
  });
}

}  // namespace tandem
