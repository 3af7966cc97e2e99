// Zero-filled host memory that goes back to the system when it is freed. malloc keeps freed memory
// of up to 32 MiB in holes, which memory of other sizes fills only in part: operators of changing
// shapes made a process grow.
#pragma once

#include <cstddef>
#include <memory>

namespace tandem {

/// Aligned to at least 64 bytes; the system backs a page at its first touch. nullptr if the system
/// has none left.
std::shared_ptr<std::byte> allocate_zeroed(size_t bytes);

}  // namespace tandem
