#include "engine/parallel/gradient_sync.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "observe/recorder.h"

namespace tandem {
namespace {

constexpr int64_t kBlock = 4096;

}  // namespace

GradientSync::GradientSync(Communicator& dp, const Tensor& gradients, const Buckets& buckets,
                           std::span<const Parameter> list, const Wire& wire, bool error_feedback,
                           std::function<void(int bucket)> reduced)
    : dp_(dp),
      gradients_(gradients),
      buckets_(buckets),
      messages_(wire, buckets, parameter_runs(list)),
      reduced_(std::move(reduced)),
      ring_(dp, "dp_reduce_scatter", buckets.count(), messages_.max_bytes(),
            wire.is_none() ? 0 : dp.size()) {
  for (int b = 0; b < buckets.count(); ++b) unreported_.push_back(buckets.bucket(b).count);
  if (dp.size() == 1 || wire.is_none()) return;
  decoded_.resize(size_t(buckets_.shard_room() * dp.size()));
  if (!error_feedback || wire.is_exact()) return;
  residual_.resize(size_t(buckets.elements()));
  next_residual_.resize(residual_.size());
}

size_t GradientSync::bytes() const {
  return ring_.bytes() +
         (residual_.size() + next_residual_.size() + decoded_.size()) * sizeof(float);
}

void GradientSync::ready(FlatRange range) {
  if (dp_.size() == 1 || range.count == 0) return;
  for (int b = buckets_.at(range.end() - 1); b <= buckets_.at(range.begin); ++b) {
    const FlatRange bucket = buckets_.bucket(b);
    unreported_[size_t(b)] -=
        std::min(bucket.end(), range.end()) - std::max(bucket.begin, range.begin);
  }
  while (final_ < buckets_.count() && unreported_[size_t(final_)] == 0) ++final_;
  progress();
}

void GradientSync::progress() {
  while (true) {
    if (sent_ < std::min(final_, summed_ + ring_.window()) && ring_.has_room(sent_)) {
      send(sent_++);
    } else if (summed_ < sent_ && ring_.has_arrived(summed_)) {
      finish_bucket();
    } else {
      return;
    }
  }
}

void GradientSync::send(int bucket) {
  const ScopedSpan span(SpanKind::compute, "send_gradients", bucket);
  for (int hop = 1; hop < dp_.size(); ++hop) {
    const int owner = ring_.destination(hop);
    const FlatRange shard = buckets_.shard(bucket, owner);
    const float* from = values() + shard.begin;
    const void* message = from;
    size_t bytes = size_t(shard.count) * sizeof(float);
    if (ring_.is_staged()) {
      std::byte* staged = ring_.staged(owner, bucket);
      float* residual = residual_.empty() ? nullptr : next_residual_.data() + shard.begin;
      if (residual) std::copy_n(residual_.data() + shard.begin, shard.count, residual);
      bytes = messages_.encode(bucket, owner, from, residual, staged);
      message = staged;
    }
    ring_.send(owner, bucket, message, bytes);
    sent_bytes_.bytes += bytes;
    sent_bytes_.uncompressed += size_t(shard.count) * sizeof(float);
  }
}

/// Gradients from `rank` for this rank's shard.
const float* GradientSync::gradients_of(int rank, int bucket) {
  if (rank == dp_.rank()) return values() + buckets_.shard(bucket, rank).begin;
  const std::byte* message = ring_.received(rank, bucket);
  if (!ring_.is_staged()) return reinterpret_cast<const float*>(message);
  float* decoded = decoded_.data() + buckets_.shard_room() * rank;
  messages_.decode(bucket, dp_.rank(), message, decoded);
  return decoded;
}

void GradientSync::sum(int bucket) {
  const FlatRange local = buckets_.shard(bucket, dp_.rank());
  std::vector<const float*> sources;
  for (int rank = 0; rank < dp_.size(); ++rank) sources.push_back(gradients_of(rank, bucket));
  std::array<float, kBlock> total;
  for (int64_t at = 0; at < local.count; at += kBlock) {
    const int64_t count = std::min(kBlock, local.count - at);
    std::memcpy(total.data(), sources[0] + at, size_t(count) * sizeof(float));
    for (size_t rank = 1; rank < sources.size(); ++rank) {
      for (int64_t i = 0; i < count; ++i) total[size_t(i)] += sources[rank][at + i];
    }
    std::memcpy(values() + local.begin + at, total.data(), size_t(count) * sizeof(float));
  }
}

/// Sums the next bucket, whose messages have arrived.
void GradientSync::finish_bucket() {
  const int bucket = summed_++;
  const ScopedSpan span(SpanKind::compute, "dp_sum", bucket);
  if (dp_.size() > 1) {
    sum(bucket);
    for (int hop = 1; hop < dp_.size(); ++hop) ring_.acknowledge(ring_.source(hop), bucket);
  }
  reduced_(bucket);
}

void GradientSync::finish() {
  final_ = buckets_.count();
  if (dp_.size() > 1) progress();
  while (summed_ < buckets_.count()) {
    while (dp_.size() > 1 && sent_ < std::min(buckets_.count(), summed_ + ring_.window())) {
      ring_.wait_for_room(sent_);
      send(sent_++);
    }
    for (int hop = 1; hop < dp_.size(); ++hop) {
      ring_.wait_for_arrival(ring_.source(hop), summed_);
    }
    finish_bucket();
  }
  ring_.next_step();
  final_ = sent_ = summed_ = 0;
  for (int b = 0; b < buckets_.count(); ++b) unreported_[size_t(b)] = buckets_.bucket(b).count;
}

}  // namespace tandem
