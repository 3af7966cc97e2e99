#include "engine/parallel/sync/segmented_exchange.h"

#include <vector>

#include "kernels/elementwise.h"
#include "kernels/outer_step.h"

namespace tandem {
namespace {

/// Sets `mean` to the mean of messages in f32, at multiples of 4 bytes, added in order.
void mean_raw(const Exec& exec, std::span<const std::byte* const> messages, const Tensor& mean) {
  std::vector<Tensor> terms;
  for (const std::byte* message : messages) {
    terms.push_back(Tensor(message, DType::f32, {mean.elements()}, exec.device));
  }
  sum(exec, terms, mean);
  divide(exec, mean, float(messages.size()));
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

void SegmentedExchange::prepare(const SyncShard& shard) {
  for_each(shard, [&](const Segment& segment) {
    if (segment.first.sharded) prepare_segment(segment);
  });
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
      copy(exec_, values, Tensor(to, DType::f32, {segment.count}, exec_.device));
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
    segment.first.sharded ? combine_segment(segment, from, values) : mean_raw(exec_, from, values);
    for (const std::byte*& message : from) message += bytes(segment);
  });
}

}  // namespace tandem
