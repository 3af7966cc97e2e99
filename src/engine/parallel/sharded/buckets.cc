#include "engine/parallel/sharded/buckets.h"

#include <iterator>

#include "engine/parallel/dims.h"

namespace tandem {
namespace {

/// Whether `next` continues `run`.
bool continues(const ParameterRun& run, const ParameterRun& next) {
  return run.begin + run.count == next.begin && run.decay == next.decay &&
         run.sharded == next.sharded && run.tensor == next.tensor &&
         run.lr_scale == next.lr_scale && !next.begins_layer;
}

std::vector<Shard> divide(int replicas, int ranks) {
  std::vector<Shard> owned;
  for (int rank = 0; rank < ranks; ++rank) owned.push_back(shard_of(replicas, ranks, rank));
  return owned;
}

}  // namespace

std::vector<Shard> RankGrid::by_rank() const {
  std::vector<Shard> shards;
  for (int rank = 0; rank < size * groups; ++rank) {
    shards.push_back(shard(index(rank), group(rank)));
  }
  return shards;
}

std::vector<Shard> RankGrid::by_index() const {
  std::vector<Shard> shards;
  for (int index = 0; index < size; ++index) shards.push_back({index * groups, groups});
  return shards;
}

std::vector<Shard> RankGrid::by_group(int index) const {
  std::vector<Shard> shards;
  for (int group = 0; group < groups; ++group) shards.push_back(shard(index, group));
  return shards;
}

Buckets::Buckets(FlatWindow window, int64_t bucket_elements, int ranks, int replicas,
                 std::vector<FlatRange> undivided)
    : Buckets(std::move(window), bucket_elements, divide(std::max(replicas, ranks), ranks),
              std::max(replicas, ranks), std::move(undivided)) {}

Buckets::Buckets(FlatWindow window, int64_t bucket_elements, std::vector<Shard> owned, int replicas,
                 std::vector<FlatRange> undivided)
    : window_(std::move(window)),
      size_(std::max<int64_t>(bucket_elements, 1)),
      undivided_(std::move(undivided)),
      owned_(std::move(owned)),
      replicas_(replicas) {
  for (auto range = window_.ranges.rbegin(); range != window_.ranges.rend(); ++range) {
    if (range->count == 0) continue;
    const int64_t last = number_of(range->whole);
    int64_t number = number_of(range->whole + range->count - 1);
    if (!numbers_.empty()) number = std::max(number, numbers_.back() + 1);
    for (; number <= last; ++number) {
      if (cut(numbered_bucket(number)).count > 0) numbers_.push_back(number);
    }
  }
  for (int b = 0; b < count(); ++b) {
    for (int rank = 0; rank < ranks(); ++rank) {
      shard_room_ = std::max(shard_room_, shard(b, rank).count);
    }
  }
}

int64_t Buckets::cut(int64_t position) const {
  const auto after = std::ranges::upper_bound(undivided_, position, {}, &FlatRange::begin);
  if (after == undivided_.begin()) return position;
  const FlatRange& range = *std::prev(after);
  return position < range.end() ? range.begin : position;
}

int64_t Buckets::number_of(int64_t element) const {
  int64_t number = (window_.elements - 1 - element) / size_;
  while (element >= cut(numbered_bucket(number).end())) --number;  // which begins earlier
  return number;
}

int Buckets::at(int64_t element) const {
  const int64_t number = number_of(window_.whole(element));
  return int(std::ranges::lower_bound(numbers_, number) - numbers_.begin());
}

double bucket_mib(const ParallelConfig& parallel, bool on_gpus) {
  if (parallel.dp_bucket_mib > 0) return parallel.dp_bucket_mib;
  // GPUs: a kernel of the optimizer is launched per bucket. DeMo: a shard has whole rows of tiles.
  return on_gpus || parallel.sync.is_demo() ? 100 : 1;
}

int64_t bucket_elements(const ParallelConfig& parallel, bool on_gpus) {
  const double elements = bucket_mib(parallel, on_gpus) * (1 << 20) / sizeof(float);
  return std::max<int64_t>(1, int64_t(elements));
}

GradientWindow gradient_window(const ParallelConfig& parallel, bool on_gpus) {
  const ParallelDims dims(parallel);
  const bool every_pass = parallel.zero == 2;
  const bool is_used = every_pass || dims.rounds() > 1;
  return {.dense = is_used && dims.num_gradients() > 1,
          .experts = is_used && dims.num_gradients() > dims.ep(),
          .every_pass = every_pass,
          .bucket_elements = bucket_elements(parallel, on_gpus)};
}

std::vector<ParameterRun> parameter_runs(std::span<const Parameter> parameters, bool by_tensor) {
  std::vector<ParameterRun> runs;
  for (size_t i = 0; i < parameters.size(); ++i) {
    const Parameter& parameter = parameters[i];
    const LocalShard shard = local_shard(parameter);
    for (int64_t row = 0; row < shard.rows; ++row) {
      if (shard.columns == 0) break;
      runs.push_back({parameter.offset + row * shard.row_stride, shard.columns, parameter.decay,
                      parameter.sharding.over_tp(), parameter.begins_layer && row == 0,
                      by_tensor ? int(i) : -1, parameter.lr_scale});
    }
  }
  std::sort(runs.begin(), runs.end(),
            [](const auto& a, const auto& b) { return a.begin < b.begin; });
  std::vector<ParameterRun> merged;
  for (const ParameterRun& run : runs) {
    if (!merged.empty() && continues(merged.back(), run)) {
      merged.back().count += run.count;
    } else {
      merged.push_back(run);
    }
  }
  return merged;
}

}  // namespace tandem
