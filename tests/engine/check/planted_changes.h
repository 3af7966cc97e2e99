// Changes of a step's tensors, with which tests plant bugs.
#pragma once

#include <functional>
#include <string>
#include <string_view>
#include <utility>

#include "engine/check/layout_steps.h"
#include "engine/model/parameter.h"
#include "engine/train/model_ranks.h"

namespace tandem {

/// This rank's shard of a tensor.
inline void change_values(const Parameter& p, const Tensor& flat,
                          const std::function<void(float&)>& change) {
  const LocalShard shard = local_shard(p);
  for (int64_t row = 0; row < shard.rows; ++row) {
    for (int64_t column = 0; column < shard.columns; ++column) {
      change(flat.as<float>()[p.offset + row * shard.row_stride + column]);
    }
  }
}

/// This rank's shards of the tensors whose name contains `name`.
inline void change_tensors(const RankStep& step, std::string_view name, bool gradients,
                           const std::function<void(float&)>& change) {
  for (const ModelChunk& chunk : step.ranks.chunks) {
    const Tensor flat = gradients ? chunk.stage.gradients() : chunk.stage.parameters();
    for (const Parameter& p : chunk.stage.parameter_list()) {
      if (p.name.find(name) != std::string::npos) change_values(p, flat, change);
    }
  }
}

inline void scale_gradients(const RankStep& step, std::string_view name, float factor) {
  change_tensors(step, name, true, [factor](float& value) { value *= factor; });
}

using OnRank = std::function<void(RankStep&)>;

inline StepHooks after_passes(OnRank change) {
  StepHooks hooks;
  hooks.after_passes = std::move(change);
  return hooks;
}
inline StepHooks scaled(std::string name, std::function<float(const RankStep&)> factor) {
  return after_passes(
      [name, factor](RankStep& step) { scale_gradients(step, name, factor(step)); });
}

}  // namespace tandem
