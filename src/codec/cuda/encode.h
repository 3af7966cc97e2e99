// Encoding and decoding on the GPU: the CPU's bytes and values (tandem/codec.h). Enqueued; nothing
// is allocated.
#pragma once

#include <cuda_runtime_api.h>

#include "tandem/codec.h"

namespace tandem::gpu {

/// Throws InvalidArgument, or Unsupported for a codec without groups, unless sums of `wire`'s
/// messages can be made on GPUs and it takes elements of `dtype`.
void require_encodable_on_gpu(const char* op, const Wire& wire, DType dtype);

/// Throws InvalidArgument unless `wire` takes the values' dtype, they are contiguous on a GPU and
/// `message` is at a multiple of 16 bytes; Unsupported for a codec that GPUs do not have.
void check_message(const char* op, const Wire& wire, const Tensor& values,
                   const std::byte* message);

/// `values` contiguous, `message` at a multiple of 16 bytes with wire.bytes; device memory. Of
/// `lossless` the header in the message says how much of it is used (codec/lossless.h), and what is
/// decoded must be what encoding made.
void launch_encode(const Wire& wire, const Tensor& values, std::byte* message, cudaStream_t stream);
void launch_decode(const Wire& wire, const std::byte* message, const Tensor& values,
                   cudaStream_t stream);
void launch_encode_lossless(const Tensor& values, std::byte* message, cudaStream_t stream);
void launch_decode_lossless(const std::byte* message, const Tensor& values, cudaStream_t stream);

/// What the owner of a shard does: of `count` messages, each `stride` bytes behind the one before,
/// the values, added in f32 in order. In the place of message `own` (-1: of none) `values` are
/// added as they are. The sum goes to `message`, encoded, and what that decodes as to `out`; where
/// `message` is null the sum itself goes to `out`, which may be `values`.
void launch_sum(const Wire& wire, const std::byte* messages, size_t stride, int count, int own,
                const Tensor& values, std::byte* message, const Tensor& out, cudaStream_t stream);

}  // namespace tandem::gpu
