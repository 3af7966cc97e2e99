// Scales of e4m3 operands, and the kernels that apply them if cuBLASLt does not.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "tandem/dtype.h"

namespace tandem::gpu {

/// Length along K after which hand-written kernels promote e4m3 accumulators to f32, as the tensor
/// cores accumulate e4m3 products in 14 bits. With 128, as in cuBLASLt, the main loop takes 5 to 7
/// % longer; with 256 the max error of a result in f16 is up to 1.4 times as large, with 512 up to
/// 2.7 times (docs/results/gpu-experiments.md).
constexpr int kPromotionK = 256;

/// Scales on the device; per-row scales are 16-byte aligned.
struct ScalePointers {
  const float* x = nullptr;
  const float* weight = nullptr;
  bool operator==(const ScalePointers&) const = default;
};

/// Applied if cuBLASLt does not scale: out[m, n] = product[m, n] x x_scales[m] x weight_scales[n] +
/// bias[n], rounded once.
struct ScaleParams {
  const float* product;  ///< may be out
  void* out;
  DType dtype;            ///< dtype of out and bias: f32, bf16 or f16
  int64_t rows, columns;  ///< columns: a multiple of 4
  const float* x_scales;
  const float* weight_scales;
  bool by_row;       ///< otherwise one scale each
  const void* bias;  ///< or nullptr
};
void launch_scale(const ScaleParams& params, cudaStream_t stream);

/// Converts to the same values in bf16: exact. Both 16-byte aligned; elements: a multiple of 16.
void launch_widen(const void* codes, void* out, int64_t elements, cudaStream_t stream);

}  // namespace tandem::gpu
