// Exact product of an output, computed once for all candidates that are compared with it.
#pragma once

#include "bench/cuda/verify.h"
#include "core/cuda/handles.h"

namespace tandem::test {

class ExactProduct {
 public:
  /// Output [rows, columns] in `out` without a residual; both operands have rows of k. Blocks.
  ExactProduct(const gpu::ProductReference& reference, int64_t rows, int64_t columns, DType out,
               cudaStream_t on);
  /// As verify_product of all outputs, but for max_rel and digest. Blocks.
  gpu::Verdict verify(const Tensor& out, cudaStream_t on) const;

 private:
  int64_t rows_, columns_;
  gpu::DeviceMemory exact_, bounds_;  // f64 [rows, columns]
};

}  // namespace tandem::test
