// Scales of e4m3 operands, and what applies them where cuBLASLt does not.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "tandem/dtype.h"

namespace tandem::gpu {

/// The tensor cores accumulate e4m3 products in 14 bits: hand-written kernels promote accumulators
/// to f32 after so much of K. With 128, as cuBLASLt has it, the main loop takes 5 to 7 % longer;
/// with 256 the largest error of a result in f16 is up to 1.4 times as large, with 512 up to 2.7
/// times (docs/dev/gpu-findings.md).
constexpr int kPromotionK = 256;

/// Scales on the device; those of rows 16-byte aligned.
struct ScalePointers {
  const float* x = nullptr;
  const float* weight = nullptr;
  bool operator==(const ScalePointers&) const = default;
};

/// Where cuBLASLt does not do it: out[m, n] = product[m, n] x x_scales[m] x weight_scales[n] +
/// bias[n], rounded once.
struct ScaleJob {
  const float* product;  ///< may be out
  void* out;
  DType dtype;            ///< of out and bias: f32, bf16 or f16
  int64_t rows, columns;  ///< columns: a multiple of 4
  const float* x_scales;
  const float* weight_scales;
  bool by_row;       ///< else one scale each
  const void* bias;  ///< or nullptr
};
void launch_scale(const ScaleJob& job, cudaStream_t stream);

/// The same values in bf16: exact. Both 16-byte aligned; elements: a multiple of 16.
void launch_widen(const void* codes, void* out, int64_t elements, cudaStream_t stream);

}  // namespace tandem::gpu
