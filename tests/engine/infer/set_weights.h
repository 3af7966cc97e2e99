// Weights of a model from a flat array, and of an engine from files.
#pragma once

#include <algorithm>
#include <span>

#include "core/exec.h"
#include "engine/model/pretrained.h"
#include "engine/model/transformer.h"

namespace tandem::test {

/// Sets the weights from this rank's flat array, [layout.size].
template <typename Model>
void set_weights(Model& model, const Exec& exec, std::span<const float> values) {
  WeightWriter writer(exec);
  model.set_weights([&](const Parameter& p, const WeightViews& to) {
    const LocalShard shard = local_shard(p);
    writer.write(shard, to, DType::f32, [&](int64_t first_row, const Tensor& out) {
      for (int64_t row = 0; row < out.dim(0); ++row) {
        const float* const from = values.data() + p.offset + (first_row + row) * shard.row_stride;
        std::copy_n(from, shard.columns, out.rows(row, 1).as<float>());
      }
    });
  });
}

inline void set_weights(Transformer& model, const Exec& exec, std::span<const float> values) {
  copy(exec, Tensor::of(values, {int64_t(values.size())}), model.parameters());
  model.parameters_changed();
}

template <typename Model>
void read_weights(Model& model, const WeightFiles& files) {
  ParameterReader reader(files, {});
  model.set_weights([&](const Parameter& p, const WeightViews& to) { reader.read(p, to); });
}

}  // namespace tandem::test
