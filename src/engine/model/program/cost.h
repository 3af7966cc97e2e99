// Costs of a layer, from its list: activations, FLOPs, parameters and what GPUs refuse.
#pragma once

#include "engine/model/program/program.h"
#include "engine/model/recompute.h"
#include "tandem/moe.h"

namespace tandem::program {

/// Sizes of a rank, in floating point, which does not overflow.
struct Sizes {
  const ModelConfig& model;
  double tokens;  ///< of a microbatch
  double tp, ep;
  double element;  ///< bytes of GEMM operands
  bool on_gpus;
  MoeSave moe_save = MoeSave::sorted;
  bool is_fp8 = false;
};

/// Bytes of a branch's activations.
struct BranchBytes {
  double saved = 0, recomputed = 0;  ///< by a layer with selective recomputation
  /// Operands of the weight gradients of a split backward pass: gradients, and recomputed values.
  double gradients = 0, operands = 0;

  double all() const { return saved + recomputed; }
  double saved_by(Recompute mode) const;
  /// Bytes of a backward pass whose weight gradients come later.
  double pending(Recompute mode) const {
    return gradients + (mode == Recompute::none ? 0 : operands);
  }
};
BranchBytes branch_bytes(const BranchProgram& program, const Sizes& sizes);
/// Activations of all layers, and the f32 residual stream before each of their branches.
double layer_bytes(const Sizes& sizes);

/// Weights of all layers, in floating point, which does not overflow.
double layer_parameters(const ModelConfig& config);
/// Products of all layers for a token of the forward pass, by ModelConfig::flops_formula.
double layer_products(const ModelConfig& config, int64_t seq);
/// Why GPUs cannot run the branch on `tp` ranks; empty if they can.
std::string gpu_refusal(const BranchProgram& program, const ModelConfig& config, int64_t tp);
/// Throws ConfigError for an operation that only CPU ranks run.
void check_gpu_operations(const ModelConfig& config);
/// Throws ConfigError for an operation that GPUs cannot run on `tp` ranks.
void check_gpus(const ModelConfig& config, int64_t tp);

}  // namespace tandem::program
