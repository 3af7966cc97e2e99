// `encode` and `decode` (tandem/codec.h) on the device of a kernel.
#pragma once

#include <cstddef>
#include <span>

#include "core/exec.h"
#include "tandem/codec.h"

namespace tandem {

/// Encodes contiguous `values` to `message` (wire.bytes(), 16-byte aligned), on exec's device, and
/// returns the bytes to send: on a GPU, where it is enqueued, wire.bytes(). Throws as `encode`.
size_t enqueue_encode(const Exec& exec, const Wire& wire, const Tensor& values, std::byte* message);
/// `message`: at least the bytes sent.
void enqueue_decode(const Exec& exec, const Wire& wire, std::span<const std::byte> message,
                    const Tensor& values);

/// GPU form: codec/cuda/enqueue.cc.
void encode_on_gpu(const Exec& exec, const Wire& wire, const Tensor& values, std::byte* message);
void decode_on_gpu(const Exec& exec, const Wire& wire, const std::byte* message,
                   const Tensor& values);

}  // namespace tandem
