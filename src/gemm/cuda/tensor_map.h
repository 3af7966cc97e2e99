// TMA tensor maps of matrices in GPU memory.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "tandem/dtype.h"

namespace tandem::gpu {

/// Map of a contiguous [rows, columns] matrix in boxes of `box_rows` x 128 bytes, stored in shared
/// memory row by row with their 16-byte chunks permuted over the banks (128-byte swizzle). Box
/// elements outside the matrix read as zero and are not written.
CUtensorMap map_matrix(const void* data, DType dtype, int64_t rows, int64_t columns, int box_rows);
/// Map of 32-bit words, [rows, columns], in boxes of `box_columns` of a row; columns are a multiple
/// of 4, a box is in shared memory as it is.
CUtensorMap map_words(const void* data, int64_t rows, int64_t columns, int box_columns);
/// Map of `count` consecutive matrices; the third coordinate is the matrix index. A box that
/// extends past its matrix does not reach into the next.
CUtensorMap map_matrices(const void* data, DType dtype, int64_t count, int64_t rows,
                         int64_t columns, int box_rows);
/// As map_matrices, with `stride` elements between rows, a multiple of 16 bytes.
CUtensorMap map_rows(const void* data, DType dtype, int64_t count, int64_t rows, int64_t columns,
                     int64_t stride, int box_rows);
/// Map of rows of `heads` vectors next to each other, with `stride` elements between rows. A box
/// has 128 bytes of each of `box_heads` heads, the second coordinate, of `box_rows` rows, the
/// third.
CUtensorMap map_heads(const void* data, DType dtype, int64_t rows, int64_t heads, int64_t head_dim,
                      int64_t stride, int box_rows, int box_heads);

}  // namespace tandem::gpu
