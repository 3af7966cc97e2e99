#include "engine/plan/cost/owned_fragments.h"

#include <utility>
#include <vector>

#include "engine/parallel/dims.h"
#include "engine/parallel/sharded/buckets.h"
#include "engine/parallel/step_placements.h"
#include "engine/parallel/sync/demo.h"

namespace tandem {
namespace {

/// Ranges of a stage's flat array that a rank of the first learner owns, ascending.
std::vector<FlatRange> owned_ranges(const ParallelConfig& parallel, const ModelLayout& whole,
                                    const ModelLayout& stage, int64_t bucket_elements, int rank) {
  const ParallelDims dims(parallel);
  std::vector<FlatRange> owned;
  for (const CopiedParameters& copied : split_experts(stage.parameters)) {
    const bool is_dense = copied.copies == kCopies;
    const FlatRange range = is_dense ? FlatRange{0, stage.experts_begin} : stage.experts();
    if (range.count == 0) continue;
    const FlatWindow window = make_window(
        stage, range, whole, is_dense ? FlatRange{0, whole.experts_begin} : whole.experts());
    const int ranks = dims.size(copied.copies);
    std::vector<FlatRange> undivided;
    if (parallel.sync.is_demo() && ranks > 1) {
      for (const FlatRange& row : tile_rows(copied.list, parallel.sync.tile_side())) {
        undivided.push_back({window.whole(row.begin - range.begin), row.count});
      }
    }
    const Buckets buckets(window, bucket_elements, ranks,
                          int(dims.gradients(copied.copies, rank).size()), std::move(undivided));
    for (int b = buckets.count() - 1; b >= 0; --b) {
      const FlatRange shard = buckets.shard(b, dims.index(copied.copies, rank));
      owned.push_back({range.begin + shard.begin, shard.count});
    }
  }
  return owned;
}

}  // namespace

ExchangeBytes largest_exchange_bytes(const ParallelConfig& parallel, const ModelLayout& whole,
                                     std::span<const ModelLayout> stages, int64_t bucket_elements) {
  const SyncConfig& sync = parallel.sync;
  if (sync.num_learners() == 1) return {};
  const ParallelDims dims(parallel);
  std::vector<FragmentSlices> slices;
  for (const ModelLayout& stage : stages) {
    slices.emplace_back(stage.parameters, sync.num_fragments());
  }
  ExchangeBytes largest;
  for (int owner = 0; owner < dims.copies(); ++owner) {
    std::vector<SyncShard> fragments(size_t(sync.num_fragments()));
    for (size_t i = 0; i < stages.size(); ++i) {
      for (const FlatRange& range : owned_ranges(parallel, whole, stages[i], bucket_elements,
                                                 dims.rank_of(kCopies, 0, owner))) {
        slices[i].add(range, fragments);
      }
    }
    const ExchangeBytes bytes = exchange_bytes(sync, fragments);
    if (bytes.total() > largest.total()) largest = bytes;
  }
  return largest;
}

}  // namespace tandem
