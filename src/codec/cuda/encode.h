// Encoding and decoding on the GPU: the CPU's bytes and values (tandem/codec.h), of every codec
// with groups. Enqueued; nothing is allocated.
#pragma once

#include <cuda_runtime_api.h>

#include "tandem/codec.h"

namespace tandem::gpu {

/// Throws InvalidArgument, or Unsupported for `lossless`, unless `wire` is a format for GPUs and
/// takes elements of `dtype`.
void require_encodable_on_gpu(const char* op, const Wire& wire, DType dtype);

/// `values` contiguous, `message` at a multiple of 16 bytes with wire.bytes; device memory.
void launch_encode(const Wire& wire, const Tensor& values, std::byte* message, cudaStream_t stream);
void launch_decode(const Wire& wire, const std::byte* message, const Tensor& values,
                   cudaStream_t stream);

}  // namespace tandem::gpu
