#include "train/data_parallel.h"

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
                           int64_t bucket_elements)
    : dp_(dp),
      parameters_(parameters),
      gradients_(gradients),
      buckets_(int64_t(parameters.size()), bucket_elements, dp.size()),
      m_(size_t(buckets_.slot_elements())),
      v_(m_.size()) {
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
  const size_t bytes = size_t(dp_.size()) * m_.size() * sizeof(float);
  const int signals = dp_.size() * buckets_.count();
  gradient_slots_ = dp_.allocate(bytes, signals);
  parameter_slots_ = dp_.allocate(bytes, signals);
}

size_t DataParallel::slot_bytes_of(int rank, int bucket) const {
  return (size_t(rank) * m_.size() + size_t(buckets_.slot_begin(bucket))) * sizeof(float);
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
  for (int hop = 1; hop < dp_.size(); ++hop) {
    const int owner = (dp_.rank() + hop) % dp_.size();
    const Buckets::Range shard = buckets_.shard(bucket, owner);
    dp_.put(owner, *gradient_slots_, slot_bytes_of(dp_.rank(), bucket),
            gradients_.data() + shard.begin, size_t(shard.count) * sizeof(float),
            signal(dp_.rank(), bucket), epoch_);
  }
}

void DataParallel::sum_bucket(int bucket) {
  const Buckets::Range own = buckets_.shard(bucket, dp_.rank());
  float* const mine = gradients_.data() + own.begin;
  std::array<float, kBlock> total;
  for (int64_t at = 0; at < own.count; at += kBlock) {
    const int64_t count = std::min(kBlock, own.count - at);
    for (int rank = 0; rank < dp_.size(); ++rank) {
      const float* source =
          (rank == dp_.rank() ? mine : floats(*gradient_slots_, slot_bytes_of(rank, bucket))) + at;
      if (rank == 0) {
        std::memcpy(total.data(), source, size_t(count) * sizeof(float));
        continue;
      }
      for (int64_t i = 0; i < count; ++i) total[size_t(i)] += source[i];
    }
    std::memcpy(mine + at, total.data(), size_t(count) * sizeof(float));
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

void DataParallel::update(const AdamStep& step) {
  size_t next = 0;
  for (int b = 0; b < buckets_.count(); ++b) {
    {
      const ScopedSpan span(SpanKind::compute, "adamw", b);
      for (; next < owned_.size() && owned_[next].bucket == b; ++next) {
        const auto& [run, slot, bucket] = owned_[next];
        const auto begin = size_t(run.begin), count = size_t(run.count);
        adamw(step, run.decay, parameters_.subspan(begin, count), gradients_.subspan(begin, count),
              std::span(m_).subspan(size_t(slot), count),
              std::span(v_).subspan(size_t(slot), count));
      }
    }
    const Buckets::Range own = buckets_.shard(b, dp_.rank());
    for (int hop = 1; hop < dp_.size(); ++hop) {
      dp_.put((dp_.rank() + hop) % dp_.size(), *parameter_slots_, slot_bytes_of(dp_.rank(), b),
              parameters_.data() + own.begin, size_t(own.count) * sizeof(float),
              signal(dp_.rank(), b), epoch_);
    }
  }
  for (int b = 0; b < buckets_.count(); ++b) {
    for (int hop = 1; hop < dp_.size(); ++hop) {
      const int owner = (dp_.rank() + dp_.size() - hop) % dp_.size();
      wait(*parameter_slots_, owner, b, "dp_all_gather");
      const Buckets::Range shard = buckets_.shard(b, owner);
      std::memcpy(parameters_.data() + shard.begin,
                  parameter_slots_->local() + slot_bytes_of(owner, b),
                  size_t(shard.count) * sizeof(float));
    }
  }
  if (dp_.size() > 1) {
    const ScopedSpan span(SpanKind::wait, "dp_flush");
    dp_.flush();
  }
  std::memset(gradients_.data(), 0, gradients_.size_bytes());
  ++epoch_;
}

std::vector<float> DataParallel::collect(Moment which) {
  std::vector<float>& mine = moment(which);
  const auto view = [](std::vector<float>& data) {
    return Tensor(data.data(), DType::f32, {int64_t(data.size())});
  };
  if (dp_.rank() != 0) {
    send(dp_, view(mine), 0);
    return {};
  }
  std::vector<float> whole(parameters_.size()), theirs(mine.size());
  for (int rank = 0; rank < dp_.size(); ++rank) {
    if (rank > 0) recv(dp_, view(theirs), rank);
    const std::vector<float>& source = rank == 0 ? mine : theirs;
    for (int b = 0; b < buckets_.count(); ++b) {
      const Buckets::Range shard = buckets_.shard(b, rank);
      std::copy_n(source.begin() + buckets_.slot_begin(b), shard.count,
                  whole.begin() + shard.begin);
    }
  }
  return whole;
}

void DataParallel::restore(Moment which, std::span<const float> whole) {
  std::vector<float>& mine = moment(which);
  for (int b = 0; b < buckets_.count(); ++b) {
    const Buckets::Range shard = buckets_.shard(b, dp_.rank());
    std::copy_n(whole.begin() + shard.begin, shard.count, mine.begin() + buckets_.slot_begin(b));
  }
}

}  // namespace tandem
