#include "engine/parallel/buckets.h"

namespace tandem {

std::vector<ParameterRun> parameter_runs(std::span<const Parameter> parameters) {
  std::vector<ParameterRun> runs;
  for (const Parameter& parameter : parameters) {
    const LocalShard shard = local_shard(parameter);
    for (int64_t row = 0; row < shard.rows; ++row) {
      if (shard.columns == 0) break;
      runs.push_back({parameter.offset + row * shard.row_stride, shard.columns, parameter.decay,
                      parameter.sharding.over_tp()});
    }
  }
  std::sort(runs.begin(), runs.end(),
            [](const auto& a, const auto& b) { return a.begin < b.begin; });
  std::vector<ParameterRun> merged;
  for (const ParameterRun& run : runs) {
    if (!merged.empty() && merged.back().begin + merged.back().count == run.begin &&
        merged.back().decay == run.decay && merged.back().sharded == run.sharded) {
      merged.back().count += run.count;
    } else {
      merged.push_back(run);
    }
  }
  return merged;
}

}  // namespace tandem
