#include "engine/parallel/weight_sync.h"

#include <algorithm>

#include "comm/exec.h"
#include "kernels/elementwise.h"
#include "observe/recorder.h"

namespace tandem {

WeightSync::WeightSync(const Exec& forward, Communicator& dp, const Tensor& weights,
                       const Buckets& buckets, std::span<const Parameter> list,
                       const Options& options, const ShardedState& state)
    : forward_(forward),
      exec_(make_exec(dp)),
      dp_(dp),
      overlap_(options.overlap),
      weights_(weights),
      working_(options.working),
      buckets_(buckets),
      messages_(options.wire, buckets, parameter_runs(list)),
      state_(state),
      ring_(dp, "dp_all_gather", buckets.count(), messages_.max_bytes(),
            options.wire.is_none() ? 0 : 1, !options.overlap),
      sent_(buckets.count()),
      received_(buckets.count()) {
  if (ring_.is_staged()) {
    refuse_on_gpu(exec_, "weights", options.wire);
    decoded_.resize(size_t(buckets_.shard_room()));
  }
  if (!exec_.on_gpu()) return;
  for (int b = 0; b < buckets.count(); ++b) updated_.emplace_back(exec_);
}

/// Updates the working copy after these weights changed.
void WeightSync::refresh(FlatRange range) {
  if (!working_.data()) return;
  cast(exec_, weights_.narrow(0, range.begin, range.count),
       working_.narrow(0, range.begin, range.count));
}

/// Fills decoded_ for this rank's shard: differences in encoded segments, weights in all others.
void WeightSync::make_differences(int bucket) {
  const float* weights = weights_.as<float>() + buckets_.shard(bucket, dp_.rank()).begin;
  const auto* masters = state_.masters(bucket).as<float>();
  for (const Segment& segment : messages_.segments(bucket, dp_.rank())) {
    for (int64_t i = segment.begin; i < segment.begin + segment.count; ++i) {
      decoded_[size_t(i)] = segment.encoded ? masters[i] - weights[i] : weights[i];
    }
  }
}

/// Applies the decoded message of `owner` to the weights.
void WeightSync::add_differences(int owner, int bucket) {
  float* weights = weights_.as<float>() + buckets_.shard(bucket, owner).begin;
  for (const Segment& segment : messages_.segments(bucket, owner)) {
    for (int64_t i = segment.begin; i < segment.begin + segment.count; ++i) {
      weights[i] = segment.encoded ? weights[i] + decoded_[size_t(i)] : decoded_[size_t(i)];
    }
  }
}

void WeightSync::begin(std::function<void(int bucket)> update) {
  update_ = std::move(update);
  sent_ = received_ = 0;
  awaited_ = -1;
  if (!exec_.on_gpu()) return send_ahead();
  for (; sent_ < buckets_.count(); ++sent_) {
    send(sent_);
    if (received_ < sent_) receive(received_++);
  }
  while (received_ < sent_) receive(received_++);
  ring_.next_step();
}

void WeightSync::send_ahead() {
  if (dp_.size() == 1) {
    for (; sent_ < buckets_.count(); ++sent_) update_(bucket_at(sent_));
    received_ = sent_;
    return;
  }
  while (sent_ < std::min(buckets_.count(), received_ + ring_.window())) send(sent_++);
}

void WeightSync::send(int index) {
  const int bucket = bucket_at(index);
  update_(bucket);
  const FlatRange local = buckets_.shard(bucket, dp_.rank());
  const float* values = weights_.as<float>() + local.begin;
  const void* message = values;
  size_t bytes = size_t(local.count) * sizeof(float);
  ring_.wait_for_room(index);
  if (ring_.is_staged()) {
    const ScopedSpan span(SpanKind::compute, "encode_weights", bucket);
    std::byte* staged = ring_.staged(0, index);
    if (state_.has_masters()) make_differences(bucket);
    bytes = messages_.encode(bucket, dp_.rank(), state_.has_masters() ? decoded_.data() : values,
                             nullptr, staged);
    message = staged;
    if (state_.has_masters()) {
      messages_.decode(bucket, dp_.rank(), staged, decoded_.data());
      add_differences(dp_.rank(), bucket);
      refresh(local);
    }
  }
  for (int hop = 1; hop < dp_.size(); ++hop) {
    ring_.send(ring_.destination(hop), index, message, bytes);
    sent_bytes_ += bytes;
  }
}

void WeightSync::receive(int index) {
  for (int hop = 1; hop < dp_.size(); ++hop) receive(ring_.source(hop), index);
  if (exec_.on_gpu()) updated_[size_t(index)].record(exec_);
}

void WeightSync::receive(int owner, int index) {
  ring_.wait_for_arrival(owner, index);
  const int bucket = bucket_at(index);
  const FlatRange shard = buckets_.shard(bucket, owner);
  const std::byte* message = ring_.received(owner, index);
  float* weights = weights_.as<float>() + shard.begin;
  if (!ring_.is_staged()) {
    copy(exec_, Tensor(message, DType::f32, {shard.count}, exec_.device),
         weights_.narrow(0, shard.begin, shard.count));
  } else {
    const ScopedSpan span(SpanKind::compute, "decode_weights", bucket, owner);
    messages_.decode(bucket, owner, message, state_.has_masters() ? decoded_.data() : weights);
    if (state_.has_masters()) add_differences(owner, bucket);
  }
  refresh(shard);
  ring_.acknowledge(owner, index);
}

void WeightSync::await(FlatRange range) {
  if (range.count == 0) return;
  const int last = bucket_at(buckets_.at(range.end() - 1));
  if (exec_.on_gpu()) {
    const int needed = overlap_ ? last : buckets_.count() - 1;
    if (needed > awaited_) updated_[size_t(needed)].await(forward_);
    awaited_ = std::max(awaited_, needed);
    return;
  }
  if (is_complete()) return;
  while (received_ <= last) {
    receive(received_++);
    send_ahead();
  }
  if (!is_complete()) return;
  const ScopedSpan span(SpanKind::wait, "dp_flush");
  dp_.flush();  // the weights may change from here on
  ring_.next_step();
}

}  // namespace tandem
