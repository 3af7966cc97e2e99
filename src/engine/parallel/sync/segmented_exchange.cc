#include "engine/parallel/sync/segmented_exchange.h"

#include <algorithm>
#include <vector>

#include "kernels/elementwise.h"
#include "kernels/outer_step.h"

namespace tandem {
namespace {

constexpr size_t kArrayAlignment = 256;  // of an array, as of memory of GPUs

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

size_t SegmentedExchange::scratch_bytes(const SyncShard& shard) const {
  int64_t largest = 0;
  for_each(shard, [&](const Segment& segment) {
    if (segment.first.sharded) largest = std::max(largest, segment.count);
  });
  const size_t array =
      (size_t(largest) * sizeof(float) + kArrayAlignment - 1) / kArrayAlignment * kArrayAlignment;
  return size_t(scratch_arrays()) * array;
}

void SegmentedExchange::prepare(const SyncShard& shard) {
  const size_t bytes = scratch_bytes(shard);
  if (bytes > scratch_.bytes()) scratch_ = Memory(bytes, exec_.device);
}

Tensor SegmentedExchange::scratch(int index, int64_t elements) const {
  return scratch_.view(DType::f32, {elements},
                       size_t(index) * scratch_.bytes() / size_t(scratch_arrays()));
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
