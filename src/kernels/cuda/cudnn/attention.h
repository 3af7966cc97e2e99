// Attention of cuDNN behind kernels/attention/attention.h. q and k are rotated in place.
#pragma once

#include <memory>
#include <string>

#include "kernels/cuda/fused_attention.h"

namespace tandem::gpu {

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
