#include "engine/model/initialize.h"

#include <algorithm>
#include <cmath>
#include <span>

#include "tandem/random.h"

namespace tandem {

void initialize_parameters(const Exec& exec, const ModelLayout& layout, const ModelConfig& config,
                           uint64_t seed, const WeightViews& to) {
  WeightWriter writer(exec);
  for (const Parameter& p : layout.parameters) {
    initialize_parameter(writer, p, config, seed, to.narrow(local_range(p)));
  }
}

void initialize_parameter(WeightWriter& writer, const Parameter& p, const ModelConfig& config,
                          uint64_t seed, const WeightViews& to) {
  const LocalShard shard = local_shard(p);
  if (p.shape.size() == 1) {
    return writer.write(shard, to, DType::f32, [&](int64_t, const Tensor& out) {
      std::fill_n(out.as<float>(), out.elements(), p.initial);
    });
  }
  const double residual = 1 / std::sqrt(2.0 * double(config.layers));
  const uint64_t stream = stream_of(p.name.c_str());
  const float scale = float(0.02 * (p.sharding.tp_dim == 1 ? residual : 1));
  writer.write(shard, to, DType::f32, [&](int64_t first_row, const Tensor& out) {
    for (int64_t i = 0; i < out.dim(0); ++i) {
      const int64_t begin = shard.first + (first_row + i) * shard.whole_columns;
      const std::span row(out.as<float>() + i * shard.columns, size_t(shard.columns));
      fill_normal(row, seed, stream, uint64_t(begin));
      for (float& value : row) value *= scale;
    }
  });
}

}  // namespace tandem
