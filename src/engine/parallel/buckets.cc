#include "engine/parallel/buckets.h"

namespace tandem {
namespace {

/// Whether `next` continues `run`.
bool continues(const ParameterRun& run, const ParameterRun& next) {
  return run.begin + run.count == next.begin && run.decay == next.decay &&
         run.sharded == next.sharded && run.tensor == next.tensor && run.lr_scale == next.lr_scale;
}

}  // namespace

std::vector<ParameterRun> parameter_runs(std::span<const Parameter> parameters, bool by_tensor) {
  std::vector<ParameterRun> runs;
  for (size_t i = 0; i < parameters.size(); ++i) {
    const Parameter& parameter = parameters[i];
    const LocalShard shard = local_shard(parameter);
    for (int64_t row = 0; row < shard.rows; ++row) {
      if (shard.columns == 0) break;
      runs.push_back({parameter.offset + row * shard.row_stride, shard.columns, parameter.decay,
                      parameter.sharding.over_tp(), by_tensor ? int(i) : -1, parameter.lr_scale});
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
