// Encoding and decoding of whole messages, by pointer: `encode` and `decode` (tandem/codec.h) after
// their checks.
#pragma once

#include <cstddef>
#include <span>

#include "tandem/codec.h"

namespace tandem::codec {

/// Throws InvalidArgument unless `wire` is a wire format that accepts elements of `dtype`.
void require_encodable(const Wire& wire, DType dtype);

/// Throws InvalidArgument, which names `op`, unless `values` is contiguous and in host memory.
void require_host(const char* op, const Tensor& values);

/// `message` has wire.bytes(). Returns the bytes used.
size_t encode_whole(const Wire& wire, DType dtype, const void* values, int64_t elements,
                    std::byte* message);
void decode_whole(const Wire& wire, std::span<const std::byte> message, DType dtype, void* values,
                  int64_t elements);

}  // namespace tandem::codec
