#include "engine/parallel/sharded/weight_sync.h"

#include <algorithm>

#include "comm/exec.h"
#include "engine/config/device_traits.h"
#include "kernels/elementwise.h"
#include "observe/recorder.h"
#include "tandem/error.h"

namespace tandem {

WeightSync::WeightSync(const Exec& forward, Communicator& dp, const WeightViews& weights,
                       const Buckets& buckets, std::span<const Parameter> list,
                       const Options& options, const ShardedState& state)
    : forward_(forward),
      exec_(make_exec(dp)),
      dp_(dp),
      overlap_(options.overlap),
      in_reduction_order_(options.in_reduction_order),
      weights_(weights),
      buckets_(buckets),
      runs_(parameter_runs(list)),
      messages_(options.wire, buckets, runs_),
      state_(state),
      slices_(make_slices()),
      ring_(dp, "dp_all_gather", buckets, message_bytes(), options.wire.is_none() ? 0 : 1,
            !options.overlap),
      begins_all_(dp.size() == 1 || ring_.is_enqueued()),
      awaited_(buckets.count() - 1),
      updated_shards_(buckets.count()),
      sent_(buckets.count()),
      received_(buckets.count()) {
  if (ring_.is_staged()) {
    refuse_on_gpu(exec_, "parallel.codec: weights as " + options.wire.describe(),
                  "weights without a wire format");
    if (!weights.f32.data()) {
      throw Unsupported("weights as " + options.wire.describe() + ": expected f32 weights");
    }
    decoded_.resize(size_t(buckets_.shard_room()));
  }
  for (int b = 0; b < buckets.count(); ++b) updated_.emplace_back(exec_);
}

/// Messages without a wire format.
std::vector<std::vector<WeightSync::Slice>> WeightSync::make_slices() const {
  std::vector<std::vector<Slice>> all;
  for (int bucket = 0; bucket < buckets_.count(); ++bucket) {
    for (int owner = 0; owner < dp_.size(); ++owner) {
      const FlatRange shard = buckets_.shard(bucket, owner);
      std::vector<Slice>& slices = all.emplace_back();
      if (weights_.f32.data()) {
        slices.push_back({weights_.in_f32(shard), 0});
        continue;
      }
      size_t offset = 0;
      for (const ParameterRun& run : runs_) {
        const int64_t begin = std::max(run.begin, shard.begin);
        const int64_t count = std::min(run.begin + run.count, shard.end()) - begin;
        if (count <= 0) continue;
        slices.push_back({run.sharded ? weights_.working.narrow(0, begin, count)
                                      : weights_.in_f32({begin, count}),
                          offset});
        constexpr size_t kAlignment = 16;
        offset += (slices.back().values.bytes() + kAlignment - 1) / kAlignment * kAlignment;
      }
    }
  }
  return all;
}

/// Bytes of the largest message.
size_t WeightSync::message_bytes() const {
  if (weights_.f32.data()) return messages_.max_bytes();
  size_t bytes = 0;
  for (const std::vector<Slice>& slices : slices_) {
    if (slices.empty()) continue;
    bytes = std::max(bytes, slices.back().offset + slices.back().values.bytes());
  }
  return (bytes + 15) / 16 * 16;
}

/// Updates the working copy after these f32 weights changed.
void WeightSync::refresh(FlatRange range) {
  if (!weights_.working.data()) return;
  cast(exec_, weights_.in_f32(range), weights_.working.narrow(0, range.begin, range.count));
}

/// Fills decoded_ for this rank's shard: differences in encoded segments, weights in all others.
void WeightSync::make_differences(int bucket) {
  const auto* weights = weights_.in_f32(buckets_.shard(bucket, dp_.rank())).as<float>();
  const auto* masters = state_.masters(bucket).as<float>();
  for (const Segment& segment : messages_.segments(bucket, dp_.rank())) {
    for (int64_t i = segment.begin; i < segment.begin + segment.count; ++i) {
      decoded_[size_t(i)] = segment.encoded ? masters[i] - weights[i] : weights[i];
    }
  }
}

/// Applies the decoded message of `owner` to the weights.
void WeightSync::add_differences(int owner, int bucket) {
  auto* weights = weights_.in_f32(buckets_.shard(bucket, owner)).as<float>();
  for (const Segment& segment : messages_.segments(bucket, owner)) {
    for (int64_t i = segment.begin; i < segment.begin + segment.count; ++i) {
      weights[i] = segment.encoded ? weights[i] + decoded_[size_t(i)] : decoded_[size_t(i)];
    }
  }
}

void WeightSync::begin(std::function<void(int bucket)> update,
                       std::function<void(int bucket)> gathered,
                       std::function<bool(int bucket)> is_ready) {
  update_ = std::move(update);
  gathered_ = std::move(gathered);
  is_ready_ = std::move(is_ready);
  sent_ = received_ = updated_shards_ = 0;
  awaited_ = -1;
  if (!begins_all_) return;
  for (; sent_ < buckets_.count(); ++sent_) {
    send(sent_);
    if (received_ < sent_) receive(received_++);
  }
  while (received_ < sent_) receive(received_++);
  ring_.next_step();
}

void WeightSync::progress() {
  if (begins_all_) return;
  while (true) {
    if (sent_ < std::min(buckets_.count(), received_ + ring_.window()) && ring_.can_send(sent_) &&
        can_update(sent_)) {
      send(sent_++);
    } else if (received_ < sent_ && ring_.can_receive(received_)) {
      receive_next();
    } else {
      return;
    }
  }
}

/// Whether `update` waits for no other rank: one that has awaited less may have left to wait for
/// this rank.
bool WeightSync::can_update(int index) const {
  return index < updated_shards_ || !is_ready_ || is_ready_(bucket_at(index));
}

/// No-op if it is done.
void WeightSync::update(int index) {
  if (index < updated_shards_) return;
  update_(bucket_at(index));
  updated_shards_ = index + 1;
}

void WeightSync::send(int index) {
  const int bucket = bucket_at(index);
  update(index);
  ring_.wait_for_room(index);
  if (ring_.is_staged()) {
    const ScopedSpan span(SpanKind::compute, "encode_weights", bucket);
    const FlatRange local = buckets_.shard(bucket, dp_.rank());
    const auto* values = weights_.in_f32(local).as<float>();
    std::byte* message = ring_.staged(0, index);
    const bool differences = state_.sends_differences();
    if (differences) make_differences(bucket);
    const size_t bytes = messages_.encode(bucket, dp_.rank(),
                                          differences ? decoded_.data() : values, nullptr, message);
    if (differences) {
      messages_.decode(bucket, dp_.rank(), message, decoded_.data());
      add_differences(dp_.rank(), bucket);
      refresh(local);
    }
    return send_message(index, message, bytes);
  }
  const std::vector<Slice>& all = slices(bucket, dp_.rank());
  if (all.empty()) return send_message(index, nullptr, 0);
  for (int hop = 1; hop < dp_.size(); ++hop) {
    for (const Slice& slice : all) {
      ring_.send(ring_.destination(hop), index, slice.values.data(), slice.values.bytes(),
                 slice.offset, &slice == &all.back());
      sent_bytes_ += slice.values.bytes();
    }
  }
}

void WeightSync::send_message(int index, const std::byte* message, size_t bytes) {
  for (int hop = 1; hop < dp_.size(); ++hop) {
    ring_.send(ring_.destination(hop), index, message, bytes);
    sent_bytes_ += bytes;
  }
}

/// CPU ranks.
void WeightSync::receive_next() {
  receive(received_++);
  if (received_ == buckets_.count()) ring_.next_step();
}

void WeightSync::receive(int index) {
  for (int hop = 1; hop < dp_.size(); ++hop) receive(ring_.source(hop), index);
  if (gathered_) gathered_(bucket_at(index));
  updated_[size_t(index)].record(exec_);
}

void WeightSync::receive(int owner, int index) {
  ring_.wait_for_arrival(owner, index);
  const int bucket = bucket_at(index);
  std::byte* const message = ring_.received(owner, index);
  if (ring_.is_staged()) {
    receive_encoded(owner, bucket, message);
  } else {
    for (const Slice& slice : slices(bucket, owner)) {
      const Tensor& to = slice.values;
      copy(exec_, Tensor(message + slice.offset, to.dtype(), {to.elements()}, exec_.device), to);
    }
  }
  if (weights_.f32.data()) refresh(buckets_.shard(bucket, owner));
  ring_.acknowledge(owner, index);
}

void WeightSync::receive_encoded(int owner, int bucket, const std::byte* message) {
  const ScopedSpan span(SpanKind::compute, "decode_weights", bucket, owner);
  auto* const weights = weights_.in_f32(buckets_.shard(bucket, owner)).as<float>();
  const bool differences = state_.sends_differences();
  messages_.decode(bucket, owner, message, differences ? decoded_.data() : weights);
  if (differences) add_differences(owner, bucket);
}

void WeightSync::await_local() {
  if (begins_all_ || state_.sends_differences() || gathered_) {
    return await({0, buckets_.elements()});
  }
  for (int index = updated_shards_; index < buckets_.count(); ++index) update(index);
}

/// Index of the last bucket of a range.
int WeightSync::last_index(FlatRange range) const {
  return bucket_at(buckets_.at(in_reduction_order_ ? range.begin : range.end() - 1));
}

bool WeightSync::has(FlatRange range) const {
  return received_ > last_index(range);
}

void WeightSync::await(FlatRange range) {
  if (range.count == 0) return;
  const int last = last_index(range);
  if (begins_all_) {
    const int needed = overlap_ ? last : buckets_.count() - 1;
    if (needed > awaited_) updated_[size_t(needed)].await(forward_);
    // The next backward pass overwrites reduced gradients, which are what was sent.
    const bool is_last = needed + 1 == buckets_.count() && awaited_ < needed;
    if (gathered_ && is_last && dp_.size() > 1) dp_.flush();
    awaited_ = std::max(awaited_, needed);
    return;
  }
  progress();
  while (received_ <= last) {
    if (sent_ == received_) send(sent_++);
    receive_next();
    progress();
  }
  const bool was_complete = is_complete();
  awaited_ = std::max(awaited_, last);
  if (was_complete || !is_complete()) return;
  const ScopedWait span(Phase::dp_wait, "dp_flush");
  dp_.flush();  // the weights may change from here on
}

}  // namespace tandem
