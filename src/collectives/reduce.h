// Element-wise reduction over one array per rank, in rank order.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "tandem/collectives.h"
#include "tandem/dtype.h"

namespace tandem::collectives {

/// Throws InvalidArgument unless `dtype` can be reduced.
void require_reducible(const char* op, DType dtype);

/// out[i] = sources[0][i] op sources[1][i] op ..., accumulated in f32 (i32: wrapping i32) and
/// rounded once. A max with a NaN is NaN. `out` may be one of the sources.
void reduce(DType dtype, ReduceOp op, std::span<const std::byte* const> sources, std::byte* out,
            int64_t count);

}  // namespace tandem::collectives
