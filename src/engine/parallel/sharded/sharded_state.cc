#include "engine/parallel/sharded/sharded_state.h"

#include <algorithm>

namespace tandem {
namespace {

constexpr int64_t kSlotAlignment = 4;  // elements: 16 bytes, as vectors of GPUs

/// First element of each bucket's shard in the rank's state, and the end of the last one. Shards
/// with undivided ranges may be much smaller than the largest.
std::vector<int64_t> find_slots(const Buckets& buckets, int rank) {
  std::vector<int64_t> slots{0};
  for (int b = 0; b < buckets.count(); ++b) {
    const int64_t elements = buckets.shard(b, rank).count;
    slots.push_back(slots.back() +
                    (elements + kSlotAlignment - 1) / kSlotAlignment * kSlotAlignment);
  }
  return slots;
}

}  // namespace

ShardedState::ShardedState(const Exec& exec, const WeightViews& weights, const Buckets& buckets,
                           int rank, Shard owned, std::span<const ParameterRun> all,
                           bool sends_differences, std::span<const Moment> outer)
    : exec_(exec),
      weights_(weights),
      buckets_(buckets),
      rank_(rank),
      owned_(owned),
      sends_differences_(sends_differences),
      slots_(find_slots(buckets, rank)),
      first_(size_t(slots_.back()) * sizeof(float), exec.device),
      second_(first_.bytes(), exec.device) {
  for (const Moment moment : outer) outer_.emplace(moment, Memory(first_.bytes(), exec.device));
  const bool has_masters = sends_differences || !weights.f32.data();
  if (has_masters) master_ = Memory(first_.bytes(), exec.device);
  const auto view = [](const Memory& memory, int64_t begin, int64_t count) {
    return memory.view(DType::f32, {count}, size_t(begin) * sizeof(float));
  };
  for (int b = 0; b < buckets.count(); ++b) {
    begins_.push_back(runs_.size());
    const FlatRange local = buckets.shard(b, rank);
    const Shard here = buckets.owned(rank);
    for (int shard = int(here.begin); shard < int(here.begin + here.count); ++shard) {
      const FlatRange range = buckets.replica_shard(b, shard);
      for (const ParameterRun& run : all) {
        const int64_t begin = std::max(run.begin, range.begin);
        const int64_t count = std::min(run.begin + run.count, range.end()) - begin;
        if (count <= 0) continue;
        const int64_t slot = slots_[size_t(b)] + begin - local.begin;
        ParameterRun local_run = run;
        local_run.begin = begin;
        local_run.count = count;
        // Replicated parameters have no separate master.
        runs_.push_back({.run = local_run,
                         .shard = shard,
                         .updated = has_masters && run.sharded ? view(master_, slot, count)
                                                               : weights.in_f32({begin, count}),
                         .first = view(first_, slot, count),
                         .second = view(second_, slot, count),
                         .slot = slot});
      }
    }
  }
  begins_.push_back(runs_.size());
}

std::span<const ShardedState::Run> ShardedState::runs(int bucket) const {
  const size_t begin = begins_[size_t(bucket)];
  return std::span(runs_).subspan(begin, begins_[size_t(bucket) + 1] - begin);
}

Tensor ShardedState::outer(Moment moment, const Run& run) const {
  const auto found = outer_.find(moment);
  if (found == outer_.end()) return {};
  return found->second.view(DType::f32, {run.run.count}, size_t(run.slot) * sizeof(float));
}

Tensor ShardedState::masters(int bucket) const {
  return master_.view(DType::f32, {buckets_.shard(bucket, rank_).count},
                      size_t(slots_[size_t(bucket)]) * sizeof(float));
}

void ShardedState::adopt_weights(const Tensor& values) {
  for (const Run& r : runs_) {
    const Tensor from = values.narrow(0, r.run.begin, r.run.count);
    if (r.updated.data() != from.data()) copy(exec_, from, r.updated);
  }
}

std::vector<StateSlice> ShardedState::slices(Moment moment, bool all) const {
  std::vector<StateSlice> slices;
  if (moment == Moment::master && !sends_differences_) return slices;
  if (moment >= Moment::anchor && !outer_.contains(moment)) return slices;
  for (const Run& r : runs_) {
    if (!all && !owns(r)) continue;
    if (moment >= Moment::anchor) {
      slices.push_back({r.run.begin, outer(moment, r)});
      continue;
    }
    const bool from_all = moment == Moment::weights && sends_differences_;
    const Tensor& values = moment == Moment::first    ? r.first
                           : moment == Moment::second ? r.second
                           : from_all                 ? weights_.in_f32({r.run.begin, r.run.count})
                                                      : r.updated;
    slices.push_back({r.run.begin, values});
  }
  return slices;
}

}  // namespace tandem
