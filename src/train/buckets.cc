#include "train/buckets.h"

namespace tandem {

LocalShape local_shape(const Parameter& parameter) {
  const auto extent = [&](int dim) {
    return dim == parameter.shard_dim ? parameter.count : parameter.shape[size_t(dim)];
  };
  if (parameter.shape.size() == 1) return {1, extent(0), extent(0)};
  return {extent(0), extent(1), parameter.row_stride};
}

std::vector<ParameterRun> parameter_runs(std::span<const Parameter> parameters) {
  std::vector<ParameterRun> runs;
  for (const Parameter& parameter : parameters) {
    const LocalShape shape = local_shape(parameter);
    for (int64_t row = 0; row < shape.rows; ++row) {
      if (shape.cols == 0) break;
      runs.push_back({parameter.offset + row * shape.row_stride, shape.cols, parameter.decay,
                      parameter.shard_dim >= 0});
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
