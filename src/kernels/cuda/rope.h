// Rotary embedding as a kernel of its own, for attention kernels that take rotated q and k.
#pragma once

#include <cstdint>

#include "kernels/rope.h"

struct CUstream_st;  // CUDA's: cudaStream_t points to it

namespace tandem::gpu {

/// back: by the negative angles, which takes the gradient of a rotated row to that of the row.
enum class Rotation { forward, back };

/// Rotates every head of q and k, bf16 [batch * seq, heads * head_dim], in place; row r has
/// position r % seq. head_dim is a multiple of 8, rows start at multiples of 16 bytes. Throws
/// InvalidArgument.
void rotate(CUstream_st* stream, const RopeTable& rope, int64_t seq, Rotation rotation,
            const Tensor& q, const Tensor& k);

}  // namespace tandem::gpu
