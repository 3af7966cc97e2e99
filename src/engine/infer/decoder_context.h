// State and memory that a decoder's steps share.
#pragma once

#include <cstdint>
#include <vector>

#include "engine/infer/cache/kv_cache.h"
#include "engine/infer/coded_weights.h"
#include "engine/model/layer.h"
#include "gemm/gemm.h"
#include "tandem/communicator.h"
#include "tandem/overlap.h"

namespace tandem {

/// Forms of a decoder's steps on a kind of device.
struct DecoderForms {
  bool reads_windows;    ///< attention reads no page before a layer's window
  bool has_row_sums;     ///< sums over the ranks are RowSums, which overlap with other rows' GEMMs
  bool fuses_additions;  ///< to the residual stream, into GEMMs and norms
  bool samples_shards;   ///< ranks sample from their shards of the logits
};
const DecoderForms& device_forms(const Exec& exec);

/// A rank's model, cache and wire formats; everything is on exec's device.
struct DecoderContext {
  Communicator& tp;
  const ModelConfig& config;
  const ModelLayout& layout;
  const Weights& weights;
  DType dtype;
  KvCache& cache;
  CodecPolicy codec = {};
  Exec exec = {};
  const CodedWeights* coded = nullptr;  ///< matrices, unless they are in `weights`

  const DecoderForms& forms() const { return device_forms(exec); }
  LayerView view() const { return {config, layout, weights, exec}; }
  bool has_experts() const { return config.moe_layers() > 0; }
  Activation activation(int64_t rows, int64_t columns) const {
    return Activation(dtype, rows, columns, exec.device);
  }
  Activation f32(int64_t rows, int64_t columns) const {
    return Activation(DType::f32, rows, columns, exec.device);
  }
};

/// Values of a step's rows, whichever way the ranks hold them; branches run one at a time.
struct StepMemory {
  /// Up to `rows` rows.
  StepMemory(const DecoderContext& context, int64_t rows);
  Activation x;  ///< residual stream, f32
  Activation inverse_rms, x_norm, hidden, inner;
  Activation sum;                     ///< of a branch over the ranks, before it is added to x
  SameBits same_bits = SameBits::no;  ///< of the step's GEMMs, on GPUs
};

/// Weights are not written between the kernels of a step.
constexpr GemmOptions kWeightIsOld{.reads_b_early = true};

/// out = x x weight^T or, with `accumulate`, added to it, with the weight as the context stores it.
void multiply(const DecoderContext& context, const Tensor& x, const LayerWeight& weight,
              const Tensor& out, SameBits same_bits, bool accumulate = false);

/// gemm_swiglu with the weight as the context stores it.
bool multiply_swiglu(const DecoderContext& context, const Tensor& x, const LayerWeight& weight,
                     const Tensor& out, SameBits same_bits);

/// Weight of an operator over the ranks, in the context's dtype; in GPU memory that the next call
/// writes, if it is stored in another form.
Tensor operand(const DecoderContext& context, const LayerWeight& weight);

/// Wire formats of the sums of rows that every rank has.
std::vector<Wire> row_sum_wires(const DecoderContext& context);

/// First rows x columns elements of scratch, as a matrix.
inline Tensor reshaped(const Tensor& scratch, int64_t rows, int64_t columns) {
  return Tensor(scratch.data(), scratch.dtype(), {rows, columns}, scratch.device());
}

/// A branch's values in `memory`: this rank's `local` rows, and those of its GEMMs.
program::Values branch_values(const BranchLayout& branch, const StepMemory& memory, int64_t local,
                              int64_t gemm_rows);

/// Residual stream of rows, and the last branch's sum, which the next branch's norm may add to it.
struct Residuals {
  Tensor x;    ///< f32
  Tensor sum;  ///< in the context's dtype
  bool is_added = true;

  /// Adds `sum` to x, now or in the next call of `norm` or `finish`.
  void add_sum(const DecoderContext& context, bool later);
  /// The branch's norm of x.
  void norm(const DecoderContext& context, const BranchLayout& branch,
            const program::Values& values);
  void finish(const DecoderContext& context);
};

}  // namespace tandem
