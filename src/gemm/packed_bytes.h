// Memory of bf16 products on processors with AMX, which pack operands.
#pragma once

#include <cstdint>

#include "tandem/tensor.h"

namespace tandem {

/// Bytes of operands that a product packs. A thread keeps the memory of its largest product.
struct PackedBytes {
  int64_t columns = 0, rows = 0;
};
/// Bytes with AMX for a[M, K] x b[K, N] in bf16, whose data are not read.
PackedBytes packed_bytes(const Tensor& a, const Tensor& b);
/// Whether products of this process use AMX.
bool uses_packing();

}  // namespace tandem
