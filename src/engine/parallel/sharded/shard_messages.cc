#include "engine/parallel/sharded/shard_messages.h"

#include <cstring>

#include "codec/feedback.h"
#include "codec/whole.h"

namespace tandem {
namespace {

constexpr size_t kAlignment = 16;

constexpr size_t aligned(size_t bytes) {
  return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

size_t raw_bytes(const Segment& segment) {
  return aligned(size_t(segment.count) * sizeof(float));
}

}  // namespace

std::vector<Segment> make_segments(FlatRange range, std::span<const ParameterRun> runs) {
  std::vector<Segment> segments;
  int64_t at = 0;  // begin of the next segment
  const auto add = [&](int64_t end, bool encoded) {
    if (end <= at) return;
    if (!segments.empty() && segments.back().encoded == encoded) {
      segments.back().count += end - at;
    } else {
      segments.push_back({at, end - at, encoded});
    }
    at = end;
  };
  for (const ParameterRun& run : runs) {
    if (!run.sharded) continue;
    const int64_t begin = std::clamp<int64_t>(run.begin - range.begin, 0, range.count);
    const int64_t end = std::clamp<int64_t>(run.begin + run.count - range.begin, 0, range.count);
    add(begin, false);
    add(end, true);
  }
  add(range.count, false);
  return segments;
}

ShardMessages::ShardMessages(const Wire& wire, const Buckets& buckets,
                             std::span<const ParameterRun> runs, DType dtype)
    : wire_(wire), ranks_(buckets.ranks()) {
  if (!wire.is_none()) codec::require_encodable(wire, DType::f32);
  for (int b = 0; b < buckets.count(); ++b) {
    for (int owner = 0; owner < ranks_; ++owner) {
      const FlatRange range = buckets.shard(b, owner);
      const auto& segments = segments_.emplace_back(
          make_segments(range, wire.is_none() ? std::span<const ParameterRun>() : runs));
      size_t bytes = 0;
      for (const Segment& segment : segments) {
        bytes += segment.encoded ? kAlignment + aligned(wire_.bytes(segment.count, DType::f32))
                                 : aligned(size_t(segment.count) * size_of(dtype));
      }
      max_bytes_ = std::max(max_bytes_, bytes);
    }
  }
}

size_t ShardMessages::encode(int bucket, int owner, const float* values, float* residual,
                             std::byte* message) const {
  std::byte* to = message;
  for (const Segment& segment : segments(bucket, owner)) {
    const float* from = values + segment.begin;
    if (!segment.encoded) {
      std::memcpy(to, from, size_t(segment.count) * sizeof(float));
      to += raw_bytes(segment);
      continue;
    }
    const uint64_t bytes =
        codec::encode_with_feedback(wire_, DType::f32, from, segment.count,
                                    residual ? residual + segment.begin : nullptr, to + kAlignment);
    std::memset(to, 0, kAlignment);
    std::memcpy(to, &bytes, sizeof bytes);
    to += kAlignment + aligned(bytes);
  }
  return size_t(to - message);
}

void ShardMessages::decode(int bucket, int owner, const std::byte* message, float* values) const {
  for (const Segment& segment : segments(bucket, owner)) {
    float* to = values + segment.begin;
    if (!segment.encoded) {
      std::memcpy(to, message, size_t(segment.count) * sizeof(float));
      message += raw_bytes(segment);
      continue;
    }
    uint64_t bytes = 0;
    std::memcpy(&bytes, message, sizeof bytes);
    codec::decode_whole(wire_, {message + kAlignment, bytes}, DType::f32, to, segment.count);
    message += kAlignment + aligned(bytes);
  }
}

}  // namespace tandem
