// Check that a layout computes what one rank does: the loss, the gradient norm and the gradient of
// every tensor in the first step of a job, from the same samples in the same microbatches.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "engine/check/layout_steps.h"
#include "engine/config/config.h"
#include "engine/data/tokens/token_source.h"

namespace tandem {

/// Kinds of what is compared, in the order in which an error spreads.
enum class Compared : uint8_t { weight, number, gradient };

/// Largest difference of a tensor.
struct TensorDifference {
  std::string tensor;  ///< or "loss", "aux_loss", "grad_norm"
  /// |found - expected| / max |expected|, of all gradients if these are below 1e-7 of them; NaN for
  /// a NaN or no value.
  double relative = 0;
  int64_t element = 0;             ///< with the difference
  double found = 0, expected = 0;  ///< that element
  Compared kind = Compared::gradient;
  double ratio = 1;      ///< found / expected of the whole tensor, by least squares
  double remainder = 0;  ///< largest |found - ratio x expected| / max |ratio x expected|
  double copies = 0;     ///< largest difference of two ranks' copies / max |expected|
};

/// Differences of all tensors of `found`, the largest first; NaN before all others. A tensor that
/// only one of the two has differs by NaN.
std::vector<TensorDifference> compare_tensors(const GatheredTensors& found,
                                              const GatheredTensors& expected,
                                              Compared kind = Compared::gradient);
/// Compares all of the first step: weights, "loss", "aux_loss" if there is one, "grad_norm" and
/// gradients.
std::vector<TensorDifference> compare_steps(const StepsOutcome& found,
                                            const StepsOutcome& expected);

/// Max relative difference of a layout in the first step. f32: 2e-6 up to 512 tokens in a step;
/// beyond, it grows with the square root of the tokens, as the rounding of gradients' sums does.
/// bf16: 2e-2.
double layout_bound(const RunConfig& train);

/// The job as one rank runs it, in whole microbatches of all replicas, without recomputation.
TrainConfig one_rank_config(const TrainConfig& config);

struct LayoutCheck {
  std::vector<TensorDifference> differences;  ///< the largest first
  double bound = 0;
  /// "tp", "cp", "ep", "dp", "pp" or "microbatches": with this number set to 1 the layout is within
  /// the bound; or "recompute": without recomputation it is. Empty if it is within the bound
  /// anyway, or if there is no such axis. dp 1 implies ep 1.
  std::string axis;

  const TensorDifference& worst() const { return differences.front(); }
  /// A number's difference.
  const TensorDifference& of(const std::string& number) const;
  size_t num_tensors() const;
  bool ok() const { return worst().relative <= bound; }
};

/// All that differs: "loss (2 x), gradient of model.layers.*.input_layernorm.weight (copies
/// differ)". Tensors of which every layer's (every expert's) differs are one name with a *; a
/// factor, if the whole tensor has it. Empty if nothing differs.
std::string describe_differences(const LayoutCheck& check);

/// Settings that a check replaces: train.dtype "auto" by f32, parallel.strategy "automatic" by
/// serial. Throws InvalidArgument for a wire format, which rounds.
TrainConfig checked_config(TrainConfig config);

/// First step of the job, as one_rank_config has it, with the samples of the job's microbatches.
StepsOutcome run_one_rank(const TrainConfig& config, const TokenSource& source);
/// Compares with `expected`, of run_one_rank. `config`: checked by check_config and made by
/// checked_config. Throws IoError if the text cannot be read.
LayoutCheck check_layout(const TrainConfig& config, const TokenSource& source,
                         const StepsOutcome& expected, const StepHooks& hooks = {});

}  // namespace tandem
