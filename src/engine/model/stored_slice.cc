#include "engine/model/stored_slice.h"

#include <array>
#include <cmath>
#include <vector>

#include "tandem/dtype.h"

namespace tandem {
namespace {

constexpr std::array<float, 16> kE2m1 = {0,     0.5f,  1,  1.5f,  2,  3,  4,  6,
                                         -0.0f, -0.5f, -1, -1.5f, -2, -3, -4, -6};
constexpr int kE8m0Bias = 127;

void store(float value, const Tensor& out, int64_t index) {
  if (out.dtype() == DType::f32) {
    out.as<float>()[index] = value;
  } else {
    out.as<BFloat16>()[index] = BFloat16::from_float(value);
  }
}

std::vector<uint8_t> read_bytes(const SafetensorsFile& file, const SafetensorsEntry& entry,
                                int64_t begin, int64_t end) {
  std::vector<uint8_t> bytes(size_t(end - begin));
  file.read(entry, begin, Tensor(bytes.data(), DType::u8, {end - begin}));
  return bytes;
}

/// Elements [begin, begin + columns) of blocks.
void read_blocks(const StoredSlice& slice, int64_t begin, int64_t columns, const Tensor& out) {
  const int64_t end = begin + columns, first_block = begin / kMxfp4Block;
  const std::vector<uint8_t> codes =
                                 read_bytes(*slice.file, *slice.whole, begin / 2, (end + 1) / 2),
                             scales = read_bytes(*slice.scales_file, *slice.scales, first_block,
                                                 (end + kMxfp4Block - 1) / kMxfp4Block);
  for (int64_t i = begin; i < end;) {
    const int64_t block = i / kMxfp4Block, block_end = std::min(end, (block + 1) * kMxfp4Block);
    const float scale = std::ldexp(1.0f, int(scales[size_t(block - first_block)]) - kE8m0Bias);
    for (; i < block_end; ++i) {
      const int byte = codes[size_t(i / 2 - begin / 2)];
      store(kE2m1[size_t(i % 2 == 0 ? byte & 15 : byte >> 4)] * scale, out, i - begin);
    }
  }
}

}  // namespace

void read_slice(const StoredSlice& slice, int64_t row, int64_t column, const Tensor& out) {
  const int64_t rows = out.dim(0), columns = out.dim(1);
  const int64_t begin = slice.first + row * slice.row_stride + column * slice.column_stride;
  if (slice.scales) {
    for (int64_t r = 0; r < rows; ++r) {
      read_blocks(slice, begin + r * slice.row_stride, columns, out.rows(r, 1));
    }
    return;
  }
  // Runs along the dimension with the smaller stride.
  const bool by_rows = rows == 1 || slice.column_stride <= slice.row_stride;
  const int64_t runs = by_rows ? rows : columns, count = by_rows ? columns : rows;
  const int64_t run_stride = by_rows ? slice.row_stride : slice.column_stride,
                stride = by_rows ? slice.column_stride : slice.row_stride;
  std::vector<float> run(size_t((count - 1) * stride + 1));
  for (int64_t r = 0; r < runs; ++r) {
    slice.file->read_f32(*slice.whole, begin + r * run_stride, run);
    for (int64_t i = 0; i < count; ++i) {
      store(run[size_t(i * stride)], out, by_rows ? r * columns + i : i * columns + r);
    }
  }
}

}  // namespace tandem
