// A Mixture-of-Experts layer whose experts are all on this GPU: a memset and five kernels between a
// router's choice and the result, and nothing that the host waits for. Rows are counted and get
// places; the first product gathers them and gates its tiles; the second multiplies what lies
// sorted; weighted sums end it.
//
// Memory: (ffn + hidden) x padded rows of the shape's dtype, at most rows x top_k + 127 for each
// expert.
#pragma once

#include <cuda_runtime_api.h>

#include <memory>

#include "core/cuda/handles.h"
#include "gemm/cuda/grouped.h"
#include "kernels/cuda/moe_place.h"
#include "tandem/moe.h"

namespace tandem::gpu {

class LocalMoe {
 public:
  /// `shape.tp` is 1; bf16 or f16. Throws InvalidArgument.
  explicit LocalMoe(const MoeShape& shape);

  /// MoeLayer::forward's operands, on this GPU: f32 or the shape's dtype for `out`. A choice that
  /// is no expert counts in refused() and its row gets nothing of it.
  void forward(const Tensor& x, const MoeRouting& routing, const Tensor& w_in, const Tensor& w_out,
               const Tensor& out, cudaStream_t stream);
  /// Choices so far that were no expert. Blocks until `stream` is empty.
  int refused(cudaStream_t stream) const;

  // The steps of `forward`, for measuring.
  void place(const MoeRouting& routing, cudaStream_t stream);
  void multiply_in(const Tensor& x, const Tensor& w_in, cudaStream_t stream);
  void multiply_out(const Tensor& w_out, cudaStream_t stream);
  void sum(const MoeRouting& routing, const Tensor& out, cudaStream_t stream);

 private:
  void check_operands(const Tensor& x, const MoeRouting& routing, const Tensor& w_in,
                      const Tensor& w_out, const Tensor& out) const;

  MoeShape shape_;
  std::unique_ptr<GroupedGemm> in_, out_;
  int64_t padded_rows_;
  DeviceMemory inner_, results_;  ///< [padded rows, ffn], [padded rows, hidden]
  DeviceMemory counts_, source_, place_, refused_;
};

}  // namespace tandem::gpu
