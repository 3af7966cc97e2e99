#include "engine/parallel/gradient_sync.h"

#include <algorithm>

#include "comm/exec.h"
#include "kernels/elementwise.h"
#include "observe/recorder.h"

namespace tandem {

GradientSync::GradientSync(const Exec& backward, Communicator& dp, const Tensor& gradients,
                           const Buckets& buckets, std::span<const Parameter> list,
                           const Options& options, std::function<void(int bucket)> reduced)
    : backward_(backward),
      exec_(make_exec(dp)),
      dp_(dp),
      overlap_(options.overlap),
      finished_(backward),
      gradients_(gradients),
      buckets_(buckets),
      messages_(options.wire, buckets, parameter_runs(list)),
      reduced_(std::move(reduced)),
      ring_(dp, "dp_reduce_scatter", buckets.count(), messages_.max_bytes(),
            options.wire.is_none() ? 0 : dp.size(), !options.overlap) {
  for (int b = 0; b < buckets.count(); ++b) unreported_.push_back(buckets.bucket(b).count);
  if (dp.size() == 1 || options.wire.is_none()) return;
  refuse_on_gpu(exec_, "gradients", options.wire);
  decoded_.resize(size_t(buckets_.shard_room() * dp.size()));
  if (!options.error_feedback || options.wire.is_exact()) return;
  residual_.resize(size_t(buckets.elements()));
  next_residual_.resize(residual_.size());
}

size_t GradientSync::bytes() const {
  return ring_.bytes() +
         (residual_.size() + next_residual_.size() + decoded_.size()) * sizeof(float);
}

void GradientSync::ready(FlatRange range) {
  if ((dp_.size() == 1 && !exec_.on_gpu()) || range.count == 0) return;
  for (int b = buckets_.at(range.end() - 1); b <= buckets_.at(range.begin); ++b) {
    const FlatRange bucket = buckets_.bucket(b);
    unreported_[size_t(b)] -=
        std::min(bucket.end(), range.end()) - std::max(bucket.begin, range.begin);
  }
  while (final_ < buckets_.count() && unreported_[size_t(final_)] == 0) ++final_;
  progress();
}

void GradientSync::progress() {
  if (exec_.on_gpu()) {
    if (overlap_ && !is_first_) enqueue();
    return;
  }
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

/// Enqueues the buckets that are final: each is summed after the next one has been sent.
void GradientSync::enqueue() {
  if (sent_ == final_) return;
  finished_.record(backward_);
  finished_.await(exec_);
  for (; sent_ < final_; ++sent_) {
    ring_.wait_for_room(sent_);
    send(sent_);
    if (summed_ < sent_) finish_bucket();
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

/// Waits for all messages of the next bucket.
void GradientSync::wait_for_arrivals() {
  for (int hop = 1; hop < dp_.size(); ++hop) {
    ring_.wait_for_arrival(ring_.source(hop), summed_);
  }
}

/// Gradients from `rank` for this rank's shard.
Tensor GradientSync::rank_gradients(int rank, int bucket) {
  const FlatRange local = buckets_.shard(bucket, dp_.rank());
  if (rank == dp_.rank()) return gradients_.narrow(0, local.begin, local.count);
  std::byte* message = ring_.received(rank, bucket);
  if (!ring_.is_staged()) return Tensor(message, DType::f32, {local.count}, exec_.device);
  float* decoded = decoded_.data() + buckets_.shard_room() * rank;
  messages_.decode(bucket, dp_.rank(), message, decoded);
  return Tensor(decoded, DType::f32, {local.count});
}

void GradientSync::sum_shard(int bucket) {
  std::vector<Tensor> terms;
  for (int rank = 0; rank < dp_.size(); ++rank) terms.push_back(rank_gradients(rank, bucket));
  sum(exec_, terms, terms[size_t(dp_.rank())]);
}

/// Sums the next bucket, whose messages have arrived; on a GPU when they have.
void GradientSync::finish_bucket() {
  if (exec_.on_gpu()) wait_for_arrivals();
  const int bucket = summed_++;
  const ScopedSpan span(SpanKind::compute, "dp_sum", bucket);
  if (dp_.size() > 1) {
    sum_shard(bucket);
    for (int hop = 1; hop < dp_.size(); ++hop) ring_.acknowledge(ring_.source(hop), bucket);
  }
  reduced_(bucket);
}

void GradientSync::finish() {
  final_ = buckets_.count();
  if (exec_.on_gpu()) {
    // Ranks that share a GPU cannot load kernels while one waits for another.
    if (std::exchange(is_first_, false) && overlap_ && dp_.size() > 1) {
      tandem::wait(backward_);
      dp_.barrier("first gradients");
    }
    enqueue();
  } else if (dp_.size() > 1) {
    progress();
  }
  while (summed_ < buckets_.count()) {
    while (dp_.size() > 1 && sent_ < std::min(buckets_.count(), summed_ + ring_.window())) {
      ring_.wait_for_room(sent_);
      send(sent_++);
    }
    if (!exec_.on_gpu()) wait_for_arrivals();
    finish_bucket();
  }
  ring_.next_step();
  final_ = sent_ = summed_ = 0;
  for (int b = 0; b < buckets_.count(); ++b) unreported_[size_t(b)] = buckets_.bucket(b).count;
}

}  // namespace tandem
