// Optimizers: a row each. Keys are in engine/optim/config.cc, kernels in kernels/optimizer.h.
#pragma once

#include <span>
#include <string_view>

#include "engine/optim/config.h"
#include "kernels/optimizer.h"

namespace tandem {

/// Constants of one step by a job's settings.
struct AdamStep : AdamConstants {
  /// `step` counts from 0.
  static AdamStep make(const OptimizerConfig& config, int64_t step, double lr,
                       double gradient_norm);
};

struct Optimizer {
  const char* name;  ///< optimizer.name
  /// Updates a slice of a tensor, and `working`, its bf16 copy, if that has data. `trust_ratio`:
  /// |w| / |direction| of the whole tensor, 1 if one of them is 0 or there are no directions.
  void (*update)(const Exec& exec, const AdamStep& step, bool decay, double trust_ratio,
                 const AdamState& state, const Tensor& gradient, const Tensor& working);
  /// First phase of a rule that needs norms of whole tensors: updates the moments and replaces
  /// `gradient` by the direction. Norms are summed over the ranks between the phases.
  void (*find_direction)(const Exec& exec, const AdamConstants& step, bool decay,
                         const AdamState& state, const Tensor& gradient) = nullptr;
};
std::span<const Optimizer> optimizers();
/// Throws ConfigError for another name.
const Optimizer& find_optimizer(std::string_view name);

}  // namespace tandem
