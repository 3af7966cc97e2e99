#include "engine/parallel/sync/fragments.h"

#include <algorithm>
#include <functional>
#include <numeric>

namespace tandem {

std::vector<int> assign_fragments(std::span<const Parameter> list, int64_t fragments) {
  std::vector<int64_t> sizes;
  for (const Parameter& p : list) {
    sizes.push_back(
        std::accumulate(p.shape.begin(), p.shape.end(), int64_t{1}, std::multiplies<>()));
  }
  const int64_t total = std::accumulate(sizes.begin(), sizes.end(), int64_t{0});
  std::vector<int> all;
  int64_t before = 0;
  for (const int64_t size : sizes) {
    all.push_back(int(double(2 * before + size) / double(2 * total) * double(fragments)));
    before += size;
  }
  return all;
}

FragmentSlices::FragmentSlices(std::span<const Parameter> list, int64_t fragments)
    : list_(list), fragments_(assign_fragments(list, fragments)), slices_(list) {}

std::vector<FragmentSlices::Slice> FragmentSlices::in(FlatRange range) const {
  std::vector<ParameterSlice> rows;
  slices_.for_each(range, [&rows](const ParameterSlice& row) { rows.push_back(row); });
  std::ranges::sort(rows, {}, &ParameterSlice::flat);
  std::vector<Slice> all;
  for (const ParameterSlice& row : rows) {
    const bool continues = !all.empty() && all.back().slice.parameter == row.parameter &&
                           all.back().flat + all.back().slice.count == row.flat;
    if (continues) {
      all.back().slice.count += row.count;
      continue;
    }
    const Parameter& p = list_[row.parameter];
    all.push_back({row.flat,
                   fragments_[row.parameter],
                   {.parameter = row.parameter,
                    .count = row.count,
                    .rows = p.shape.size() > 1 ? p.shape[0] : 1,
                    .columns = p.shape.back(),
                    .local_columns = local_shard(p).columns,
                    .sharded = p.sharding.over_tp()}});
  }
  return all;
}

void FragmentSlices::add(FlatRange range, std::span<SyncShard> fragments) const {
  for (const Slice& each : in(range)) fragments[size_t(each.fragment)].add(each.slice);
}

std::optional<int> fragment_due(const SyncConfig& config, int64_t step) {
  const int64_t fragments = config.num_fragments(), period = config.period();
  for (int64_t p = 0; step > 0 && p < fragments; ++p) {
    if (step % period == p * period / fragments) return int(p);
  }
  return std::nullopt;
}

std::optional<SentFragment> fragment_in_flight(const SyncConfig& config, int64_t step) {
  for (int64_t sent = step; sent > step - config.delay; --sent) {
    if (const auto fragment = fragment_due(config, sent)) return SentFragment{*fragment, sent};
  }
  return std::nullopt;
}

}  // namespace tandem
