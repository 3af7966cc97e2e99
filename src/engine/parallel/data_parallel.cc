#include "engine/parallel/data_parallel.h"

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
  const int signals = dp_.size() * buckets_.count();
  const auto bytes = [&](const ShardMessages& messages) {
    return size_t(signals) * messages.max_bytes();
  };
  gradient_slots_ = dp_.allocate(bytes(gradient_messages_), signals);
  parameter_slots_ = dp_.allocate(bytes(weight_messages_), signals);
  if (!wires.gradients.is_none()) {
    gradient_staging_.resize(bytes(gradient_messages_));
    decoded_.resize(size_t(buckets_.shard_room() * dp_.size()));
    if (wires.error_feedback && !wires.gradients.is_exact()) {
      residual_.resize(gradients_.size());
      next_residual_.resize(gradients_.size());
    }
  }
  if (!wires.weights.is_none()) {
    weight_staging_.resize(size_t(buckets_.count()) * weight_messages_.max_bytes());
    decoded_.resize(std::max(decoded_.size(), size_t(buckets_.shard_room())));
    if (!wires.weights.is_exact()) master_.resize(m_.size());
  }
}

void DataParallel::adopt_parameters() {
  for (const Part& part : parts(Moment::master)) {
    std::copy_n(parameters_.begin() + part.begin, part.values.size(), part.values.begin());
  }
}

void DataParallel::wait(SymmetricBuffer& buffer, int rank, int bucket, const char* op) {
  const ScopedSpan span(SpanKind::wait, op, bucket, rank);
  dp_.wait(buffer, signal(rank, bucket), epoch_, {op, rank, bucket});
}

void DataParallel::ready(int64_t begin) {
  if (dp_.size() == 1) return;
  while (sent_ < buckets_.count() && buckets_.bucket(sent_).begin >= begin) {
    send_gradients(sent_++);
  }
}

void DataParallel::send_gradients(int bucket) {
  const ScopedSpan span(SpanKind::compute, "send_gradients", bucket);
  for (int hop = 1; hop < dp_.size(); ++hop) {
    const int owner = (dp_.rank() + hop) % dp_.size();
    const Buckets::Range shard = buckets_.shard(bucket, owner);
    const float* values = gradients_.data() + shard.begin;
    const void* source = values;
    size_t bytes = size_t(shard.count) * sizeof(float);
    if (!gradient_staging_.empty()) {
      std::byte* message = gradient_staging_.data() + slot_of(gradient_messages_, owner, bucket);
      float* residual = residual_.empty() ? nullptr : next_residual_.data() + shard.begin;
      if (residual) std::copy_n(residual_.data() + shard.begin, shard.count, residual);
      bytes = gradient_messages_.encode(bucket, owner, values, residual, message);
      source = message;
    }
    dp_.put(owner, *gradient_slots_, slot_of(gradient_messages_, dp_.rank(), bucket), source, bytes,
            signal(dp_.rank(), bucket), epoch_);
    sent_bytes_.gradients += bytes;
    sent_bytes_.plain += size_t(shard.count) * sizeof(float);
  }
}

/// Gradients from `rank` for this rank's shard.
const float* DataParallel::gradients_of(int rank, int bucket) {
  if (rank == dp_.rank()) return gradients_.data() + buckets_.shard(bucket, rank).begin;
  const size_t slot = slot_of(gradient_messages_, rank, bucket);
  if (gradient_staging_.empty()) return floats(*gradient_slots_, slot);
  float* decoded = decoded_.data() + buckets_.shard_room() * rank;
  gradient_messages_.decode(bucket, dp_.rank(), gradient_slots_->local() + slot, decoded);
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

DataParallel::Squares DataParallel::reduce() {
  ready(0);
  Squares squares;
  size_t next = 0;
  for (int b = 0; b < buckets_.count(); ++b) {
    for (int hop = 1; hop < dp_.size(); ++hop) {
      wait(*gradient_slots_, (dp_.rank() + dp_.size() - hop) % dp_.size(), b, "dp_reduce_scatter");
    }
    const ScopedSpan span(SpanKind::compute, "dp_sum", b);
    if (dp_.size() > 1) sum_bucket(b);
    for (; next < owned_.size() && owned_[next].bucket == b; ++next) {
      const ParameterRun& run = owned_[next].run;
      (run.sharded ? squares.sharded : squares.replicated) += sum_of_squares(
          std::span<const float>(gradients_).subspan(size_t(run.begin), size_t(run.count)));
    }
  }
  sent_ = 0;
  return squares;
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
  if (!weight_staging_.empty()) {
    const ScopedSpan span(SpanKind::compute, "encode_weights", bucket);
    std::byte* message = weight_staging_.data() + size_t(bucket) * weight_messages_.max_bytes();
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
    dp_.put((dp_.rank() + hop) % dp_.size(), *parameter_slots_,
            slot_of(weight_messages_, dp_.rank(), bucket), source, bytes,
            signal(dp_.rank(), bucket), epoch_);
    sent_bytes_.weights += bytes;
  }
}

void DataParallel::receive_weights(int owner, int bucket) {
  wait(*parameter_slots_, owner, bucket, "dp_all_gather");
  const Buckets::Range shard = buckets_.shard(bucket, owner);
  const size_t slot = slot_of(weight_messages_, owner, bucket);
  float* weights = parameters_.data() + shard.begin;
  if (weight_staging_.empty()) {
    std::memcpy(weights, parameter_slots_->local() + slot, size_t(shard.count) * sizeof(float));
    return;
  }
  const ScopedSpan span(SpanKind::compute, "decode_weights", bucket, owner);
  weight_messages_.decode(bucket, owner, parameter_slots_->local() + slot,
                          has_masters() ? decoded_.data() : weights);
  if (has_masters()) add_differences(owner, bucket);
}

void DataParallel::update(const AdamStep& step) {
  residual_.swap(next_residual_);
  size_t next = 0;
  for (int b = 0; b < buckets_.count(); ++b) {
    step_bucket(b, next, step);
    if (dp_.size() > 1) send_weights(b);
  }
  for (int b = 0; b < buckets_.count(); ++b) {
    for (int hop = 1; hop < dp_.size(); ++hop) {
      receive_weights((dp_.rank() + dp_.size() - hop) % dp_.size(), b);
    }
  }
  if (dp_.size() > 1) {
    const ScopedSpan span(SpanKind::wait, "dp_flush");
    dp_.flush();
  }
  std::memset(gradients_.data(), 0, gradients_.size_bytes());
  ++epoch_;
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

}  // namespace tandem
