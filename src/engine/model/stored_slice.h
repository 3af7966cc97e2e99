// Parameters whose elements are strided in a tensor on disk (fused_experts.h), which may be in
// MXFP4: blocks of 32 numbers in 4 bits (e2m1), the first of each byte in its lower half, and an
// exponent (e8m0) of each block.
#pragma once

#include <cstdint>

#include "core/formats/safetensors.h"
#include "tandem/tensor.h"

namespace tandem {

/// Numbers of a block of MXFP4, and its bytes.
constexpr int64_t kMxfp4Block = 32, kMxfp4BlockBytes = 16;

struct StoredSlice {
  const SafetensorsFile* file = nullptr;
  const SafetensorsEntry* whole = nullptr;  ///< f32, bf16 or f16; with scales u8 blocks
  int64_t first = 0, row_stride = 0, column_stride = 0;  ///< elements, as of ExpertSlice
  const SafetensorsFile* scales_file = nullptr;
  const SafetensorsEntry* scales = nullptr;  ///< u8; nullptr: not in MXFP4
};

/// Whether a row's elements are farther apart in the file than rows: many rows are read at once.
bool is_transposed(const StoredSlice& slice);
/// Reads elements [row, column] and those after them to `out`, f32 or bf16 [rows, columns], in
/// host memory. Throws IoError.
void read_slice(const StoredSlice& slice, int64_t row, int64_t column, const Tensor& out);

}  // namespace tandem
