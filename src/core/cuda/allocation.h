// Identity of an allocation, independent of its address, which may be reused after a free.
#pragma once

#include <cstddef>
#include <cstdint>

namespace tandem::gpu {

/// Process-wide unique id, never reused, of the allocation that contains all `bytes` (more than 0)
/// from `memory` on. 0: not allocated by CUDA, or not one allocation, such as adjacent mappings.
uint64_t allocation_of(const void* memory, size_t bytes);

}  // namespace tandem::gpu
