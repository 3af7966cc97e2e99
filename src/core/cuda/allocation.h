// What memory is, whatever its address: an address may come again once its memory was freed.
#pragma once

#include <cstddef>
#include <cstdint>

namespace tandem::gpu {

/// A number that no other allocation of this process has had or will have, of the one that holds
/// all `bytes` (more than 0) from `memory` on. 0: CUDA did not allocate it, or not in one piece, as
/// mappings that lie one behind the other.
uint64_t allocation_of(const void* memory, size_t bytes);

}  // namespace tandem::gpu
