// Attention by kernels prepared for the tensors of one Attention (kernels/attention/attention.h):
// cuDNN's (cudnn/attention.h) and our own (hopper_attention.h). q and k are rotated in place.
#pragma once

#include "kernels/cuda/kernels.h"

namespace tandem::gpu {

/// Semantics as Attention's.
class FusedAttention {
 public:
  virtual ~FusedAttention() = default;
  virtual void forward(const Exec& exec, const Tensor& q, const Tensor& k, const Tensor& v,
                       const Tensor& out, const Tensor& log_sums, const AttentionMask& mask) = 0;
  virtual void forward_again(const Exec& exec, const Tensor& q, const Tensor& k, const Tensor& v,
                             const Tensor& out, const Tensor& log_sums,
                             const AttentionMask& mask) = 0;
  virtual void backward(const Exec& exec, const AttentionGradients& tensors,
                        const AttentionMask& mask) = 0;

 protected:
  FusedAttention(const Exec& exec, const AttentionRows& rows) : stream_(exec.stream), rows_(rows) {}
  /// Throw InvalidArgument for operands with which the kernels would compute wrong results.
  void check_stream(const Exec& exec) const;
  void check_rows(const char* name, const Tensor& tensor, int64_t stride) const;
  void check_log_sums(const Tensor& tensor) const;
  static void check_rotated(const Tensor& q, const Tensor& k);

  CUstream_st* const stream_;
  const AttentionRows rows_;
};

}  // namespace tandem::gpu
