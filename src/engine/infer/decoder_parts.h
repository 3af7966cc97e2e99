// Scratch shared by all branches of a block of rows.
#pragma once

#include <cstdint>

#include "engine/infer/decoder.h"
#include "gemm/gemm.h"

namespace tandem {

/// Weights are not written between the kernels of a step.
constexpr GemmOptions kWeightIsOld{.reads_b_early = true};

/// Max columns over the branches of the `in` GEMM's output, and of the `out` GEMM's input.
int64_t widest_in(const ModelLayout& layout);
int64_t widest_inner(const ModelLayout& layout);

/// out = x x weight^T, with the weight as the context stores it.
void multiply(const DecoderContext& context, const Tensor& x, const LayerWeight& weight,
              const Tensor& out);

/// Wire formats of the sums of rows that every rank has.
std::vector<Wire> row_sum_wires(const DecoderContext& context);

/// First rows x columns elements of scratch, as a matrix.
inline Tensor reshaped(const Tensor& scratch, int64_t rows, int64_t columns) {
  return Tensor(scratch.data(), scratch.dtype(), {rows, columns}, scratch.device());
}

/// Values of a branch in a block's scratch, for x with as many rows as `x_norm` and GEMMs of
/// `rows`.
inline program::Values branch_values(const BranchLayout& branch, const Tensor& x_norm,
                                     const Tensor& inverse_rms, const Tensor& hidden,
                                     const Tensor& inner, int64_t rows) {
  program::Values values{x_norm, inverse_rms, reshaped(hidden, rows, branch.in.rows),
                         reshaped(inner, rows, branch.out.columns)};
  program::set_ranges(branch, values);
  return values;
}

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
