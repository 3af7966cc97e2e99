// Encoding and decoding on the GPU: the CPU's bytes and values (tandem/codec.h). Enqueued;
// allocates nothing.
#pragma once

#include <cuda_runtime_api.h>

#include "tandem/codec.h"

namespace tandem::gpu {

/// Throws InvalidArgument unless GPUs can sum `wire`'s messages and it accepts elements of `dtype`;
/// Unsupported for a codec without groups.
void require_encodable_on_gpu(const char* op, const Wire& wire, DType dtype);

/// Throws InvalidArgument unless `wire` accepts the values' dtype, they are contiguous on a GPU and
/// `message` is 16-byte aligned; Unsupported for a codec that GPUs lack.
void check_message(const char* op, const Wire& wire, const Tensor& values,
                   const std::byte* message);

/// `values` contiguous, `message` 16-byte aligned with wire.bytes(); device memory. For `lossless`
/// the header in the message gives the bytes used (codec/lossless.h), and decoding accepts only
/// messages made by encoding.
void launch_encode(const Wire& wire, const Tensor& values, std::byte* message, cudaStream_t stream);
void launch_decode(const Wire& wire, const std::byte* message, const Tensor& values,
                   cudaStream_t stream);
void launch_encode_lossless(const Tensor& values, std::byte* message, cudaStream_t stream);
void launch_decode_lossless(const std::byte* message, const Tensor& values, cudaStream_t stream);

/// Sum on the owner of a shard: decodes `count` messages, `stride` bytes apart, and adds them in
/// f32 in order. Message `local` (-1: none) is replaced by `values`, added uncompressed. The sum is
/// encoded to `message`, and its decoded values go to `out`; if `message` is null, the sum itself
/// goes to `out`, which may be `values`.
void launch_sum(const Wire& wire, const std::byte* messages, size_t stride, int count, int local,
                const Tensor& values, std::byte* message, const Tensor& out, cudaStream_t stream);

}  // namespace tandem::gpu
