// Attention by our own kernels for Hopper's tensor cores (kernels/cuda/sm90/), with documents and
// windows, and equal bits in every run. q and k are rotated in place, by their positions in the
// sequence: within a document only differences of positions count.
#pragma once

#include <memory>

#include "kernels/cuda/cudnn/attention.h"

namespace tandem::gpu {

/// Allocates the scratch memory of the backward pass: the gradient of q in f32, and a few bytes a
/// row of each head. Nullptr where the simple kernels are to run, with a note of the reason in the
/// log, or for nothing to compute. Throws DeviceError.
std::unique_ptr<FusedAttention> make_hopper_attention(const Exec& exec, const AttentionShape& shape,
                                                      const RopeTable& rope,
                                                      const AttentionRows& rows);

}  // namespace tandem::gpu
