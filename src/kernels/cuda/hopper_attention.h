// Attention by our own kernels for Hopper's tensor cores (kernels/cuda/sm90/), with documents and
// windows, and equal bits in every run. q and k are rotated in place, by their positions in the
// sequence: within a document only differences of positions count. Where they run they are
// preferred to cuDNN's deterministic ones (docs/results/training.md), whose memory is quadratic in
// it.
#pragma once

#include <memory>
#include <string>

#include "kernels/cuda/fused_attention.h"

namespace tandem::gpu {

/// Reason that these kernels do not run on this thread's GPU with these tensors, or empty. Throws
/// DeviceError.
std::string why_not_hopper_attention(const AttentionShape& shape, const AttentionRows& rows);

/// For tensors that there is no such reason against. Allocates the scratch memory of the backward
/// pass: the gradient of q in f32, and a few bytes a row of each head. Throws DeviceError.
std::unique_ptr<FusedAttention> make_hopper_attention(const Exec& exec, const AttentionShape& shape,
                                                      const RopeTable& rope,
                                                      const AttentionRows& rows);

}  // namespace tandem::gpu
