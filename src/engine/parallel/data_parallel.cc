#include "engine/parallel/data_parallel.h"

#include <fmt/format.h>

#include <array>
#include <cstring>

#include "observe/recorder.h"

namespace tandem {
namespace {

constexpr int64_t kBlock = 4096;

const float* floats(const SymmetricBuffer& buffer, size_t byte) {
  return reinterpret_cast<const float*>(buffer.local() + byte);
}

}  // namespace

DataParallel::DataParallel(Communicator& dp, std::span<float> parameters,
                           std::span<float> gradients, std::span<const Parameter> list,
                           int64_t bucket_elements, const DataParallelWires& wires)
    : dp_(dp),
      parameters_(parameters),
      gradients_(gradients),
      buckets_(int64_t(parameters.size()), bucket_elements, dp.size()),
      m_(size_t(buckets_.slot_elements())),
      v_(m_.size()),
      gradient_messages_(wires.gradients, buckets_, parameter_runs(list)),
      weight_messages_(wires.weights, buckets_, parameter_runs(list)) {
  const std::vector<ParameterRun> runs = parameter_runs(list);
  for (int b = 0; b < buckets_.count(); ++b) {
    const Buckets::Range own = buckets_.shard(b, dp_.rank());
    for (const ParameterRun& run : runs) {
      const int64_t begin = std::max(run.begin, own.begin);
      const int64_t end = std::min(run.begin + run.count, own.begin + own.count);
      if (begin >= end) continue;
      owned_.push_back({{begin, end - begin, run.decay, run.sharded},
                        buckets_.slot_begin(b) + begin - own.begin,
                        b});
    }
  }
  if (dp_.size() == 1) return;
  make_ring(gradient_ring_, gradient_messages_, wires.gradients.is_none() ? 0 : dp_.size());
  make_ring(weight_ring_, weight_messages_, wires.weights.is_none() ? 0 : 1);
  if (!wires.gradients.is_none()) {
    decoded_.resize(size_t(buckets_.shard_room() * dp_.size()));
    if (wires.error_feedback && !wires.gradients.is_exact()) {
      residual_.resize(gradients_.size());
      next_residual_.resize(gradients_.size());
    }
  }
  if (!wires.weights.is_none()) {
    decoded_.resize(std::max(decoded_.size(), size_t(buckets_.shard_room())));
    if (!wires.weights.is_exact()) master_.resize(m_.size());
  }
}

void DataParallel::make_ring(Ring& ring, const ShardMessages& messages, int staged_ranks) {
  ring.window = std::clamp(buckets_.count(), 1, kWindow);
  ring.message_bytes = messages.max_bytes();
  ring.slots = dp_.allocate(size_t(dp_.size() * ring.window) * ring.message_bytes,
                            dp_.size() * (ring.window + 1));
  ring.staging.resize(size_t(staged_ranks * ring.window) * ring.message_bytes);
}

size_t DataParallel::state_bytes() const {
  const auto bytes = [](const auto& values) { return values.size() * sizeof(values[0]); };
  const auto slots = [](const Ring& ring) { return ring.slots ? ring.slots->bytes() : 0; };
  return bytes(m_) + bytes(v_) + bytes(master_) + bytes(residual_) + bytes(next_residual_) +
         bytes(decoded_) + bytes(gradient_ring_.staging) + bytes(weight_ring_.staging) +
         slots(gradient_ring_) + slots(weight_ring_);
}

void DataParallel::adopt_parameters() {
  for (const Part& part : parts(Moment::master)) {
    std::copy_n(parameters_.begin() + part.begin, part.values.size(), part.values.begin());
  }
}

bool DataParallel::has_room(const Ring& ring, int bucket) const {
  if (ring.epoch(bucket) <= uint64_t(ring.window)) return true;
  for (int hop = 1; hop < dp_.size(); ++hop) {
    const uint64_t read = dp_.read_signal(*ring.slots, acknowledgement(ring, previous(hop)));
    if (read < ring.epoch(bucket) - uint64_t(ring.window)) return false;
  }
  return true;
}

void DataParallel::wait_for_room(const Ring& ring, int bucket) {
  if (ring.epoch(bucket) <= uint64_t(ring.window)) return;
  for (int hop = 1; hop < dp_.size(); ++hop) {
    const int rank = previous(hop);
    const ScopedSpan span(SpanKind::wait, ring.op, bucket, rank);
    dp_.wait(*ring.slots, acknowledgement(ring, rank), ring.epoch(bucket) - uint64_t(ring.window),
             {ring.op, rank, bucket});
  }
}

bool DataParallel::has_arrived(const Ring& ring, int bucket) const {
  for (int hop = 1; hop < dp_.size(); ++hop) {
    const int signal = ring.arrival(previous(hop), bucket);
    if (dp_.read_signal(*ring.slots, signal) < ring.epoch(bucket)) return false;
  }
  return true;
}

void DataParallel::wait_for_arrival(const Ring& ring, int rank, int bucket) {
  const ScopedSpan span(SpanKind::wait, ring.op, bucket, rank);
  dp_.wait(*ring.slots, ring.arrival(rank, bucket), ring.epoch(bucket), {ring.op, rank, bucket});
}

void DataParallel::acknowledge(const Ring& ring, int rank, int bucket) {
  dp_.put(rank, *ring.slots, 0, nullptr, 0, acknowledgement(ring, dp_.rank()), ring.epoch(bucket));
}

void DataParallel::ready(int64_t begin) {
  if (dp_.size() == 1) return;
  while (final_ < buckets_.count() && buckets_.bucket(final_).begin >= begin) ++final_;
  while (true) {
    if (sent_ < std::min(final_, summed_ + gradient_ring_.window) &&
        has_room(gradient_ring_, sent_)) {
      send_gradients(sent_++);
    } else if (summed_ < sent_ && has_arrived(gradient_ring_, summed_)) {
      finish_bucket();
    } else {
      return;
    }
  }
}

void DataParallel::send_gradients(int bucket) {
  const ScopedSpan span(SpanKind::compute, "send_gradients", bucket);
  Ring& ring = gradient_ring_;
  for (int hop = 1; hop < dp_.size(); ++hop) {
    const int owner = peer(hop);
    const Buckets::Range shard = buckets_.shard(bucket, owner);
    const float* values = gradients_.data() + shard.begin;
    const void* source = values;
    size_t bytes = size_t(shard.count) * sizeof(float);
    if (!ring.staging.empty()) {
      std::byte* message = ring.staging.data() + ring.offset(owner, bucket);
      float* residual = residual_.empty() ? nullptr : next_residual_.data() + shard.begin;
      if (residual) std::copy_n(residual_.data() + shard.begin, shard.count, residual);
      bytes = gradient_messages_.encode(bucket, owner, values, residual, message);
      source = message;
    }
    dp_.put(owner, *ring.slots, ring.offset(dp_.rank(), bucket), source, bytes,
            ring.arrival(dp_.rank(), bucket), ring.epoch(bucket));
    sent_bytes_.gradients += bytes;
    sent_bytes_.plain += size_t(shard.count) * sizeof(float);
  }
}

/// Gradients from `rank` for this rank's shard.
const float* DataParallel::gradients_of(int rank, int bucket) {
  if (rank == dp_.rank()) return gradients_.data() + buckets_.shard(bucket, rank).begin;
  const size_t offset = gradient_ring_.offset(rank, bucket);
  if (gradient_ring_.staging.empty()) return floats(*gradient_ring_.slots, offset);
  float* decoded = decoded_.data() + buckets_.shard_room() * rank;
  gradient_messages_.decode(bucket, dp_.rank(), gradient_ring_.slots->local() + offset, decoded);
  return decoded;
}

void DataParallel::sum_bucket(int bucket) {
  const Buckets::Range own = buckets_.shard(bucket, dp_.rank());
  std::vector<const float*> sources;
  for (int rank = 0; rank < dp_.size(); ++rank) sources.push_back(gradients_of(rank, bucket));
  std::array<float, kBlock> total;
  for (int64_t at = 0; at < own.count; at += kBlock) {
    const int64_t count = std::min(kBlock, own.count - at);
    std::memcpy(total.data(), sources[0] + at, size_t(count) * sizeof(float));
    for (size_t rank = 1; rank < sources.size(); ++rank) {
      for (int64_t i = 0; i < count; ++i) total[size_t(i)] += sources[rank][at + i];
    }
    std::memcpy(gradients_.data() + own.begin + at, total.data(), size_t(count) * sizeof(float));
  }
}

/// Sums the next bucket, whose messages have arrived.
void DataParallel::finish_bucket() {
  const int bucket = summed_++;
  const ScopedSpan span(SpanKind::compute, "dp_sum", bucket);
  if (dp_.size() > 1) {
    sum_bucket(bucket);
    for (int hop = 1; hop < dp_.size(); ++hop) acknowledge(gradient_ring_, previous(hop), bucket);
  }
  for (; squared_runs_ < owned_.size() && owned_[squared_runs_].bucket == bucket; ++squared_runs_) {
    const ParameterRun& run = owned_[squared_runs_].run;
    (run.sharded ? squares_.sharded : squares_.replicated) += sum_of_squares(
        std::span<const float>(gradients_).subspan(size_t(run.begin), size_t(run.count)));
  }
}

DataParallel::Squares DataParallel::reduce() {
  ready(0);
  while (summed_ < buckets_.count()) {
    while (dp_.size() > 1 && sent_ < std::min(buckets_.count(), summed_ + gradient_ring_.window)) {
      wait_for_room(gradient_ring_, sent_);
      send_gradients(sent_++);
    }
    for (int hop = 1; hop < dp_.size(); ++hop) {
      wait_for_arrival(gradient_ring_, previous(hop), summed_);
    }
    finish_bucket();
  }
  gradient_ring_.begin += uint64_t(buckets_.count());
  final_ = sent_ = summed_ = 0;
  squared_runs_ = 0;
  return std::exchange(squares_, {});
}

void DataParallel::step_bucket(int bucket, size_t& next, const AdamStep& step) {
  const ScopedSpan span(SpanKind::compute, "adamw", bucket);
  for (; next < owned_.size() && owned_[next].bucket == bucket; ++next) {
    const auto& [run, slot, of_bucket] = owned_[next];
    const auto begin = size_t(run.begin), count = size_t(run.count);
    const bool is_master = has_masters() && run.sharded;
    adamw(step, run.decay,
          is_master ? std::span(master_).subspan(size_t(slot), count)
                    : parameters_.subspan(begin, count),
          gradients_.subspan(begin, count), std::span(m_).subspan(size_t(slot), count),
          std::span(v_).subspan(size_t(slot), count));
  }
}

/// Fills decoded_ for this rank's shard: differences in encoded segments, weights in all others.
void DataParallel::make_differences(int bucket) {
  const float* weights = parameters_.data() + buckets_.shard(bucket, dp_.rank()).begin;
  const float* masters = master_.data() + buckets_.slot_begin(bucket);
  for (const Segment& segment : weight_messages_.segments(bucket, dp_.rank())) {
    for (int64_t i = segment.begin; i < segment.begin + segment.count; ++i) {
      decoded_[size_t(i)] = segment.encoded ? masters[i] - weights[i] : weights[i];
    }
  }
}

/// Applies the decoded message of `owner` to the weights.
void DataParallel::add_differences(int owner, int bucket) {
  float* weights = parameters_.data() + buckets_.shard(bucket, owner).begin;
  for (const Segment& segment : weight_messages_.segments(bucket, owner)) {
    for (int64_t i = segment.begin; i < segment.begin + segment.count; ++i) {
      weights[i] = segment.encoded ? weights[i] + decoded_[size_t(i)] : decoded_[size_t(i)];
    }
  }
}

void DataParallel::send_weights(int bucket) {
  const Buckets::Range own = buckets_.shard(bucket, dp_.rank());
  const void* source = parameters_.data() + own.begin;
  size_t bytes = size_t(own.count) * sizeof(float);
  Ring& ring = weight_ring_;
  wait_for_room(ring, bucket);
  if (!ring.staging.empty()) {
    const ScopedSpan span(SpanKind::compute, "encode_weights", bucket);
    std::byte* message = ring.staging.data() + ring.offset(0, bucket);
    if (has_masters()) make_differences(bucket);
    bytes = weight_messages_.encode(
        bucket, dp_.rank(), has_masters() ? decoded_.data() : static_cast<const float*>(source),
        nullptr, message);
    source = message;
    if (has_masters()) {
      weight_messages_.decode(bucket, dp_.rank(), message, decoded_.data());
      add_differences(dp_.rank(), bucket);
    }
  }
  for (int hop = 1; hop < dp_.size(); ++hop) {
    dp_.put(peer(hop), *ring.slots, ring.offset(dp_.rank(), bucket), source, bytes,
            ring.arrival(dp_.rank(), bucket), ring.epoch(bucket));
    sent_bytes_.weights += bytes;
  }
}

void DataParallel::receive_weights(int owner, int bucket) {
  wait_for_arrival(weight_ring_, owner, bucket);
  const Buckets::Range shard = buckets_.shard(bucket, owner);
  const std::byte* message = weight_ring_.slots->local() + weight_ring_.offset(owner, bucket);
  float* weights = parameters_.data() + shard.begin;
  if (weight_ring_.staging.empty()) {
    std::memcpy(weights, message, size_t(shard.count) * sizeof(float));
    return;
  }
  const ScopedSpan span(SpanKind::compute, "decode_weights", bucket, owner);
  weight_messages_.decode(bucket, owner, message, has_masters() ? decoded_.data() : weights);
  if (has_masters()) add_differences(owner, bucket);
}

void DataParallel::receive_bucket(int bucket) {
  for (int hop = 1; hop < dp_.size(); ++hop) {
    receive_weights(previous(hop), bucket);
    acknowledge(weight_ring_, previous(hop), bucket);
  }
}

void DataParallel::update(const AdamStep& step) {
  residual_.swap(next_residual_);
  const int count = buckets_.count();
  size_t next = 0;
  for (int b = 0; b < count; ++b) {
    step_bucket(b, next, step);
    if (dp_.size() == 1) continue;
    if (b >= weight_ring_.window) receive_bucket(b - weight_ring_.window);
    send_weights(b);
  }
  if (dp_.size() > 1) {
    for (int b = std::max(0, count - weight_ring_.window); b < count; ++b) receive_bucket(b);
    const ScopedSpan span(SpanKind::wait, "dp_flush");
    dp_.flush();
  }
  std::memset(gradients_.data(), 0, gradients_.size_bytes());
  weight_ring_.begin += uint64_t(count);
}

float* DataParallel::values_of(const OwnedRun& owned, Moment moment) {
  switch (moment) {
    case Moment::weights:
      break;
    case Moment::first:
      return m_.data() + owned.slot;
    case Moment::second:
      return v_.data() + owned.slot;
    case Moment::master:  // replicated parameters have no separate master
      if (!owned.run.sharded) break;
      return master_.data() + owned.slot;
  }
  return parameters_.data() + owned.run.begin;
}

std::vector<DataParallel::Part> DataParallel::parts(Moment moment) {
  std::vector<Part> parts;
  if (moment == Moment::master && !has_masters()) return parts;
  for (const OwnedRun& owned : owned_) {
    parts.push_back({owned.run.begin, {values_of(owned, moment), size_t(owned.run.count)}});
  }
  return parts;
}

std::string describe_state(const DataParallel& dense, const DataParallel* experts) {
  const auto parameters = double(dense.parameters() + (experts ? experts->parameters() : 0));
  const auto bytes = double(dense.state_bytes() + (experts ? experts->state_bytes() : 0));
  return fmt::format(
      "memory: {:.1f} bytes a parameter and rank for weights, gradients, optimizer and messages",
      8 + bytes / parameters);
}

}  // namespace tandem
