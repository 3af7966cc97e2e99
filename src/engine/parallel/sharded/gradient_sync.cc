#include "engine/parallel/sharded/gradient_sync.h"

#include <fmt/format.h>

#include <algorithm>

#include "comm/exec.h"
#include "engine/config/device_traits.h"
#include "kernels/elementwise.h"
#include "observe/recorder.h"
#include "tandem/error.h"

namespace tandem {

GradientSync::GradientSync(const Exec& backward, Communicator& dp, const GradientMemory& gradients,
                           int64_t begin, const Buckets& buckets, std::span<const Parameter> list,
                           const Options& options, std::function<void(int bucket)> reduced)
    : backward_(backward),
      exec_(make_exec(dp)),
      dp_(dp),
      overlap_(options.overlap),
      is_window_(options.is_window),
      encodes_(!options.wire.is_none()),
      finished_(backward),
      copied_(exec_),
      gradients_(gradients),
      begin_(begin),
      buckets_(buckets),
      messages_(options.wire, buckets, parameter_runs(list), gradients.dtype()),
      reduced_(std::move(reduced)),
      ring_(dp, "dp_reduce_scatter", buckets, messages_.max_bytes(),
            encodes_ || is_window_ ? dp.size() : 0, !options.overlap),
      is_loading_(ring_.is_enqueued()) {
  if (gradients.dtype() != DType::f32 && (encodes_ || is_window_)) {
    throw Unsupported(fmt::format("gradients in {}: expected f32 with a wire format or a window",
                                  name_of(gradients.dtype())));
  }
  for (int b = 0; b < buckets.count(); ++b) unreported_.push_back(buckets.bucket(b).count);
  if (is_window_) {
    copies_ = Memory(size_t(ring_.window() * buckets.shard_room()) * sizeof(float), exec_.device);
    sums_ = Memory(size_t(buckets.slot_elements()) * sizeof(float), exec_.device);
  }
  if (dp.size() == 1 || !encodes_) return;
  refuse_on_gpu(exec_, "parallel.codec: gradients as " + options.wire.describe(),
                "gradients without a wire format");
  decoded_.resize(size_t(buckets_.shard_room() * dp.size()));
  if (!options.error_feedback || options.wire.is_exact()) return;
  residual_.resize(size_t(buckets.elements()));
  next_residual_.resize(residual_.size());
}

size_t GradientSync::bytes() const {
  return ring_.bytes() + copies_.bytes() +
         (residual_.size() + next_residual_.size() + decoded_.size()) * sizeof(float);
}

void GradientSync::ready(FlatRange range) {
  if (range.count == 0) return;
  for (int b = buckets_.at(range.end() - 1); b <= buckets_.at(range.begin); ++b) {
    const FlatRange bucket = buckets_.bucket(b);
    unreported_[size_t(b)] -=
        std::min(bucket.end(), range.end()) - std::max(bucket.begin, range.begin);
  }
  while (final_ < buckets_.count() && unreported_[size_t(final_)] == 0) ++final_;
  progress();
}

void GradientSync::progress() {
  const bool is_local = dp_.size() == 1 && !is_window_ && !ring_.is_enqueued();
  if (!is_local && !is_loading_ && !ring_.blocks()) advance();
}

/// Sends and sums what is final and, on CPU ranks, would not wait.
void GradientSync::advance() {
  if (sent_ < final_) {
    finished_.record(backward_);
    finished_.await(exec_);
  }
  // An enqueued sum follows the next bucket's messages, which are on their way while it waits.
  const bool is_enqueued = ring_.is_enqueued();
  const int behind = is_enqueued ? std::max(1, std::min(sent_ - summed_, ring_.window() - 1)) : 0;
  const int ahead = is_enqueued ? behind + 1 : ring_.window();
  while (true) {
    if (sent_ < std::min(final_, summed_ + ahead) && ring_.can_send(sent_)) {
      send(sent_++);
    } else if (summed_ + behind < sent_ && ring_.can_receive(summed_)) {
      finish_bucket();
    } else {
      return;
    }
  }
}

/// Window: memory of this rank's shard of a bucket in flight.
Tensor GradientSync::copied(int bucket) const {
  const int64_t slot = bucket % ring_.window();
  return copies_.view(DType::f32, {buckets_.shard(bucket, dp_.rank()).count},
                      size_t(slot * buckets_.shard_room()) * sizeof(float));
}

/// Window: copies a bucket's shards to where they are sent or encoded from.
void GradientSync::copy_bucket(int bucket) {
  for (int owner = 0; owner < dp_.size(); ++owner) {
    const FlatRange shard = buckets_.shard(bucket, owner);
    if (shard.count == 0) continue;
    const bool is_local = owner == dp_.rank();
    float* const encoded = decoded_.data() + buckets_.shard_room() * owner;
    const Tensor to =
        is_local   ? copied(bucket)
        : encodes_ ? Tensor(encoded, DType::f32, {shard.count})
                   : Tensor(ring_.staged(owner, bucket), DType::f32, {shard.count}, exec_.device);
    gradients_.for_each(
        {begin_ + shard.begin, shard.count}, [&](FlatRange range, const Tensor& values) {
          copy(exec_, values, to.narrow(0, range.begin - begin_ - shard.begin, range.count));
        });
  }
  copied_.record(exec_);
}

/// Window: whether the rank runs a logical replica in this pass.
bool GradientSync::has_replica(int rank) const {
  const int rounds = (buckets_.replicas() + dp_.size() - 1) / dp_.size();
  return passes_ % rounds * dp_.size() + rank < buckets_.replicas();
}

void GradientSync::send(int bucket) {
  const ScopedSpan span(SpanKind::compute, "send_gradients", bucket);
  if (is_window_ && !has_replica(dp_.rank())) {
    for (int hop = 1; hop < dp_.size(); ++hop) {
      ring_.send(ring_.destination(hop), bucket, nullptr, 0);
    }
    return;
  }
  if (is_window_) copy_bucket(bucket);
  for (int hop = 1; hop < dp_.size(); ++hop) {
    const int owner = ring_.destination(hop);
    const FlatRange shard = buckets_.shard(bucket, owner);
    const void* message = is_window_ ? ring_.staged(owner, bucket) : local(shard).data();
    size_t bytes = size_t(shard.count) * size_of(gradients_.dtype());
    if (encodes_) {
      std::byte* staged = ring_.staged(owner, bucket);
      float* residual = residual_.empty() ? nullptr : next_residual_.data() + shard.begin;
      if (residual && passes_ == 0) {
        std::copy_n(residual_.data() + shard.begin, shard.count, residual);
      }
      const float* from =
          is_window_ ? decoded_.data() + buckets_.shard_room() * owner : local(shard).as<float>();
      bytes = messages_.encode(bucket, owner, from, residual, staged);
      message = staged;
    }
    ring_.send(owner, bucket, message, bytes);
    sent_bytes_.bytes += bytes;
    sent_bytes_.uncompressed += size_t(shard.count) * size_of(gradients_.dtype());
  }
}

/// Gradients from `rank` for this rank's shard.
Tensor GradientSync::rank_gradients(int rank, int bucket) {
  const FlatRange shard = buckets_.shard(bucket, dp_.rank());
  if (rank == dp_.rank()) return is_window_ ? copied(bucket) : local(shard);
  std::byte* message = ring_.received(rank, bucket);
  if (!encodes_) return Tensor(message, gradients_.dtype(), {shard.count}, exec_.device);
  float* decoded = decoded_.data() + buckets_.shard_room() * rank;
  messages_.decode(bucket, dp_.rank(), message, decoded);
  return Tensor(decoded, DType::f32, {shard.count});
}

Tensor GradientSync::reduced(FlatRange range) const {
  if (!is_window_) return local(range);
  const int bucket = buckets_.at(range.begin);
  const int64_t slot =
      buckets_.slot_begin(bucket) + range.begin - buckets_.shard(bucket, dp_.rank()).begin;
  return sums_.view(DType::f32, {range.count}, size_t(slot) * sizeof(float));
}

/// With a window, adds to the sum of the passes before.
void GradientSync::sum_shard(int bucket) {
  const FlatRange shard = buckets_.shard(bucket, dp_.rank());
  if (shard.count == 0) return;
  const Tensor to = reduced(shard);
  std::vector<Tensor> terms;
  if (is_window_ && passes_ > 0) terms.push_back(to);
  for (int rank = 0; rank < dp_.size(); ++rank) {
    if (is_window_ && !has_replica(rank)) break;
    terms.push_back(rank_gradients(rank, bucket));
  }
  sum(exec_, terms, to);
}

/// Sums the next bucket, whose messages have arrived; on a GPU when they have.
void GradientSync::finish_bucket() {
  const int bucket = summed_++;
  const ScopedSpan span(SpanKind::compute, "dp_sum", bucket);
  if (dp_.size() > 1 || is_window_) {
    sum_shard(bucket);
    for (int hop = 1; hop < dp_.size(); ++hop) ring_.acknowledge(ring_.source(hop), bucket);
  }
  if (!is_window_) reduced_(bucket);
}

/// Sends all buckets before `target`, and sums those that ranks then wait for.
void GradientSync::send_until(int target) {
  while (sent_ < target) {
    while (sent_ < std::min(target, summed_ + ring_.window())) {
      ring_.wait_for_room(sent_);
      send(sent_++);
    }
    if (sent_ == target) return;
    ring_.wait_for_arrivals(summed_);
    finish_bucket();
  }
}

void GradientSync::make_room(int64_t sent_from) {
  if (final_ == buckets_.count()) finish_pass();
  const int target = sent_from >= buckets_.elements() ? 0 : buckets_.at(sent_from) + 1;
  // The first passes load kernels, which a stream that waits for ranks on this GPU would delay.
  ring_.set_host_waits(is_loading_ || !overlap_);
  finished_.record(backward_);
  finished_.await(exec_);
  send_until(target);
  copied_.await(backward_);
}

void GradientSync::skip_pass() {
  ring_.set_host_waits(is_loading_ || !overlap_);
  if (final_ == buckets_.count()) finish_pass();
  final_ = buckets_.count();
  progress();
}

/// Sends and sums all buckets of a pass.
void GradientSync::finish_pass() {
  final_ = buckets_.count();
  finished_.record(backward_);
  finished_.await(exec_);
  send_until(buckets_.count());
  while (summed_ < buckets_.count()) {
    ring_.wait_for_arrivals(summed_);
    finish_bucket();
  }
  copied_.await(backward_);
  ++passes_;
  end_pass();
}

void GradientSync::end_pass() {
  ring_.next_step();
  final_ = sent_ = summed_ = 0;
  for (int b = 0; b < buckets_.count(); ++b) unreported_[size_t(b)] = buckets_.bucket(b).count;
}

/// After the first passes: ranks that share a GPU cannot load kernels while one waits for another.
void GradientSync::finish_loading() {
  if (!std::exchange(is_loading_, false) || !overlap_ || dp_.size() == 1) return;
  tandem::wait(backward_);
  dp_.barrier("first gradients");
}

void GradientSync::finish() {
  if (is_window_) {
    finish_pass();
    passes_ = 0;
    finish_loading();
    for (int bucket = 0; bucket < buckets_.count(); ++bucket) reduced_(bucket);
    return;
  }
  final_ = buckets_.count();
  finish_loading();
  advance();
  while (summed_ < buckets_.count()) {
    send_until(std::min(buckets_.count(), summed_ + ring_.window()));
    ring_.wait_for_arrivals(summed_);
    finish_bucket();
  }
  end_pass();
}

}  // namespace tandem
