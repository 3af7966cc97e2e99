#include "engine/checkpoint/owned_loading.h"

#include <algorithm>
#include <cstring>
#include <functional>
#include <vector>

#include "comm/world/host_ranks.h"
#include "engine/parallel/collective_check.h"
#include "tandem/collectives.h"

namespace tandem {
namespace {

/// Elements that are sent at a time.
constexpr int64_t kSentChunk = 1 << 22;

struct OwnedSlice {
  FlatRange range;
  const float* values;
};

/// Called with elements from `begin` on, f32 on the host.
using StoreValues = std::function<void(int64_t begin, const Tensor& values)>;

/// Calls `store` for the slices of all ranks. Collective.
void gather(Communicator& comm, std::span<const OwnedSlice> owned, const StoreValues& store) {
  std::vector<FlatRange> ranges;
  for (const OwnedSlice& slice : owned) ranges.push_back(slice.range);
  std::vector<float> buffer;
  const auto all = comm.exchange(std::as_bytes(std::span(ranges)), "slices of the owned state");
  for (int root = 0; root < comm.size(); ++root) {
    std::vector<FlatRange> remote(all[size_t(root)].size() / sizeof(FlatRange));
    std::memcpy(remote.data(), all[size_t(root)].data(), all[size_t(root)].size());
    size_t index = 0;
    int64_t at = 0;  // in the slice
    while (index < remote.size()) {
      // As many slices, or their first elements, as fit a chunk.
      std::vector<FlatRange> chunk;
      buffer.clear();
      int64_t count = 0;
      while (index < remote.size() && count < kSentChunk) {
        const FlatRange& range = remote[index];
        const int64_t here = std::min(range.count - at, kSentChunk - count);
        chunk.push_back({range.begin + at, here});
        if (root == comm.rank()) {
          const float* from = owned[index].values + at;
          buffer.insert(buffer.end(), from, from + here);
        }
        count += here;
        at += here;
        if (at < range.count) continue;
        ++index;
        at = 0;
      }
      buffer.resize(size_t(count));
      const Tensor values = Tensor::of(std::span(buffer), {count});
      if (comm.size() > 1) broadcast(comm, values, root);
      int64_t stored = 0;
      for (const FlatRange& range : chunk) {
        store(range.begin, values.narrow(0, stored, range.count));
        stored += range.count;
      }
    }
  }
}

/// Stores to all slices that overlap. `slices` are sorted.
void store_in_slices(const Exec& exec, std::span<const StateSlice> slices, int64_t begin,
                     const Tensor& values) {
  const int64_t end = begin + values.elements();
  auto at = std::ranges::upper_bound(slices, begin, {}, &StateSlice::begin);
  if (at != slices.begin()) --at;  // it may contain `begin`
  for (; at != slices.end() && at->begin < end; ++at) {
    const int64_t first = std::max(begin, at->begin),
                  last = std::min(end, at->begin + at->values.elements());
    if (first >= last) continue;
    copy(exec, values.narrow(0, first - begin, last - first),
         at->values.narrow(0, first - at->begin, last - first));
  }
}

void load_stage(const TrainedRanks& ranks, size_t index, const SnapshotGeneration& owned) {
  const auto& [model, optimizer] = ranks.stages[index];
  const Exec& exec = model.exec();
  const Tensor staging = model.parameter_staging();
  for (const ShardedOptimizer::StateGroup& group : optimizer.state_groups()) {
    const auto comm = split_on_host(group.replicas);
    const DiskDeadline longer(*comm);  // other groups may have more to send
    for (const Moment moment : kAllMoments) {
      std::vector<OwnedSlice> slices;
      owned.for_each(index, moment, [&](int64_t begin, const Tensor& values) {
        if (begin < group.range.begin || begin >= group.range.end()) return;
        slices.push_back({{begin, values.elements()}, values.as<const float>()});
      });
      if (moment == Moment::weights) {
        gather(*comm, slices, [&](int64_t begin, const Tensor& values) {
          copy(exec, values, staging.narrow(0, begin, values.elements()));
        });
        continue;
      }
      std::vector<StateSlice> local = optimizer.slices(moment, true);
      std::ranges::sort(local, {}, &StateSlice::begin);
      gather(*comm, slices, [&](int64_t begin, const Tensor& values) {
        store_in_slices(exec, local, begin, values);
      });
    }
  }
  // Otherwise the masters were sent, and the weights of all ranks differ from them.
  if (!ranks.has_masters()) optimizer.adopt_weights(staging);
}

}  // namespace

void load_owned(const TrainedRanks& ranks, const SnapshotGeneration& owned) {
  for (size_t stage = 0; stage < ranks.stages.size(); ++stage) load_stage(ranks, stage, owned);
  const std::vector<Tensor> residuals = owned.residuals();
  size_t index = 0;
  for (const TrainedStage& stage : ranks.stages) {
    for (const Tensor& residual : stage.optimizer.residuals()) {
      copy({}, residuals.at(index++), residual);
    }
  }
  for (const TrainedStage& stage : ranks.stages) stage.model.parameters_changed();
}

}  // namespace tandem
