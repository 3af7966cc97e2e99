// Operations fused after a sum in a Transformer: residual add, and RMSNorm for the next layer.
#pragma once

#include "tandem/export.h"
#include "tandem/tensor.h"

TANDEM_API_BEGIN
namespace tandem {

/// hidden = residual + sum, out = hidden x rsqrt(mean over a row of hidden^2 + eps) x gain. Every
/// rank passes the same residual. `hidden` is rounded once to its dtype; the statistics are
/// computed in f32 from the rounded values, and out is rounded once: the same bits on every rank.
/// All tensors have out's dtype. `hidden` may alias all of `residual`.
struct AddNorm {
  Tensor residual;    ///< [m, n]
  Tensor gain;        ///< [n], contiguous
  Tensor hidden;      ///< [m, n], written: the residual of the next call
  float eps = 1e-5f;  ///< at least 0
};

}  // namespace tandem
TANDEM_API_END
