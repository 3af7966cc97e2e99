// Attention of cuDNN behind kernels/attention/attention.h. q and k are rotated in place.
#pragma once

#include <memory>
#include <string>

#include "kernels/attention/attention.h"
#include "kernels/cuda/kernels.h"

namespace tandem::gpu {

/// Kernels prepared for the tensors of one Attention; semantics as there.
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
};

/// Memory that a deterministic backward pass may take, unless one key head of one sequence needs
/// more.
constexpr int64_t kAttentionWorkspace = int64_t(8) << 30;

/// Loads device code, which waits for all kernels of the device, and allocates the workspace.
/// Nullptr where the simple kernels are to run, with a note of the reason in the log
/// (kernels/attention/simple_attention.h), or for nothing to compute. Throws DeviceError.
std::unique_ptr<FusedAttention> make_cudnn_attention(const Exec& exec, const AttentionShape& shape,
                                                     const RopeTable& rope,
                                                     const AttentionRows& rows,
                                                     int64_t max_workspace = kAttentionWorkspace);

/// Version of cuDNN, or "absent: " and the reason.
std::string describe_cudnn();

}  // namespace tandem::gpu
