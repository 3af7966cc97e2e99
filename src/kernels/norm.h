// RMSNorm by rows: out = x / sqrt(mean(x^2) + eps) * factor. Statistics and the residual stream x
// are f32; out and its gradient are f32 or bf16.
#pragma once

#include "core/exec.h"

namespace tandem {

/// Weights of a norm, f32 [hidden], whose factors are offset + weight. An offset is for CPU ranks.
/// Without dimensions there is no norm: out is x, rounded to its dtype, and dx += dout.
struct NormWeight {
  NormWeight() = default;
  NormWeight(const Tensor& values_, float offset_ = 0) : values(values_), offset(offset_) {}
  bool has_norm() const { return values.dims() > 0; }
  int64_t elements() const { return values.elements(); }
  /// Throws Unsupported for an offset.
  const Tensor& on_gpu() const;

  Tensor values;
  float offset = 0;
};

/// x: f32 [rows, hidden]; out: [rows, hidden]; inverse_rms: f32 [rows], saved for the backward
/// pass if there is a norm.
void rms_norm_forward(const Exec& exec, const Tensor& x, const NormWeight& weight, double eps,
                      const Tensor& out, const Tensor& inverse_rms);

/// Residual add before the norm: y = x + branch, then rms_norm_forward of y. x and y: f32, branch
/// has out's dtype; y may be x. Bits are those of the two steps.
void add_rms_norm_forward(const Exec& exec, const Tensor& x, const Tensor& branch,
                          const NormWeight& weight, double eps, const Tensor& y, const Tensor& out,
                          const Tensor& inverse_rms);

/// Inference form: x, weight and out of one dtype, f32 or bf16.
void rms_norm(const Exec& exec, const Tensor& x, const Tensor& weight, double eps,
              const Tensor& out);

/// Rows of scratch that rms_norm_backward needs: at most `rows`, 0 on a CPU.
int64_t rms_norm_partial_sums(const Exec& exec, int64_t rows, int64_t hidden);
/// dx (f32, or bf16, rounded after the sum) += d(out)/d(x) dout; dweight (f32) += d(out)/d(weight)
/// dout. partial_sums: scratch, f32 [rms_norm_partial_sums(exec, rows, hidden), hidden], unused on
/// a CPU. dx_bf16: dx rounded; without data it is not written. On a GPU throws Unsupported without
/// a norm.
void rms_norm_backward(const Exec& exec, const Tensor& x, const NormWeight& weight,
                       const Tensor& inverse_rms, const Tensor& dout, const Tensor& dx,
                       const Tensor& dweight, const Tensor& partial_sums = {},
                       const Tensor& dx_bf16 = {});

}  // namespace tandem
