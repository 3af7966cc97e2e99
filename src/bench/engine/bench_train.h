// Time of a forward and a backward pass through layers of a published model, for `tandem bench
// train`: without embedding, head and optimizer. Gradients of the weights are computed, not summed
// over data-parallel ranks.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "bench/bench.h"
#include "engine/config/config.h"

namespace tandem {

struct TrainBench {
  std::string model = "llama-8b";
  int64_t layers = 0;  ///< 0: all of the model
  int64_t seq = 2048;
  int64_t window = 0;     ///< as ModelConfig::sliding_window, of every layer
  int64_t documents = 0;  ///< mean tokens of packed documents, exponential; 0: none
  int64_t batch = 1;      ///< sequences of a tensor-parallel group
  int tp = 1, ep = 1;     ///< world: tp x ep ranks
  std::string dtype = "bf16";
  std::string gradient_dtype = "f32";     ///< train.gradient_dtype
  std::string residual_gradient = "f32";  ///< train.residual_gradient
  std::string recompute = "none";         ///< train.recompute
  bool deterministic = true;              ///< train.deterministic
  int repeats = 10;
};

struct TrainBenchResult {
  BenchTimes step;       ///< on GPUs each after an idle gap, in which the clock recovers
  BenchTimes sustained;  ///< one after another, of each
  /// With tp > 1, as `step`: with communication after or before each GEMM, and without any: layers
  /// with a rank's shard of the weights on one rank. Its norms cover all rows, where a rank of the
  /// group has a tp-th of them.
  std::optional<BenchTimes> serial, alone;
  double flops = 0;          ///< of a step of all ranks, by ModelConfig::flops_formula without head
  double peak_flops = 0;     ///< per second, of all ranks (engine/plan/cost/utilization.h)
  int64_t memory_bytes = 0;  ///< in use on a rank after the steps (core/exec.h), largest
  size_t activation_bytes = 0;         ///< of a rank
  std::vector<Receipt> receipts = {};  ///< of this rank's operators in two steps

  /// Gradients of one layer and 64 tokens against CPU ranks in f32: largest ratio of a tensor's
  /// error |found - exact| / |exact| to its bound, and that tensor. Bound: 1.5 x the error of CPU
  /// ranks in the same dtype, and 2e-5; with experts 0.1 more, as rounding changes rows' experts.
  double of_bound = 0;
  std::string worst;
  bool bitwise_equal_runs = true;  ///< output and all gradients of two steps, and of one that
                                   ///< saves all activations
  bool deterministic = true;       ///< as requested: else runs may differ

  /// Utilization of a pass of `us`; 0 if it exceeds a measured peak, which then was too low.
  double mfu(double us) const {
    const double mfu = flops / (us * 1e-6) / peak_flops;
    return mfu <= 1 ? mfu : 0;
  }
  bool ok() const { return of_bound <= 1 && (bitwise_equal_runs || !deterministic); }
};

/// Throws InvalidArgument or ConfigError for a request that cannot run; on CPU ranks also if memory
/// is too small.
TrainConfig train_bench_config(const TrainBench& request, bool on_gpus, bool ranks_share_gpu);

/// Returns equal results on all ranks. Collective over tp x ep ranks.
TrainBenchResult run_train_bench(Communicator& world, const TrainBench& request);

}  // namespace tandem
