// How TMA addresses a matrix in GPU memory.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "tandem/dtype.h"

namespace tandem::gpu {

/// Of [rows, columns], contiguous, in boxes of `box_rows` x 128 bytes, which lie in shared memory a
/// row after the other, their 16-byte chunks permuted over the banks (128-byte swizzle). What a box
/// has beyond the matrix reads as zero and is not written.
CUtensorMap map_matrix(const void* data, DType dtype, int64_t rows, int64_t columns, int box_rows);
/// Of `count` of them, one after the other; the third coordinate is the matrix's number. What a box
/// has beyond its matrix is no part of the next.
CUtensorMap map_matrices(const void* data, DType dtype, int64_t count, int64_t rows,
                         int64_t columns, int box_rows);

}  // namespace tandem::gpu
