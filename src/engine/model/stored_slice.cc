#include "engine/model/stored_slice.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <span>
#include <vector>

#include "codec/numbers.h"
#include "core/cpu/tasks.h"
#include "tandem/dtype.h"
#include "tandem/error.h"

namespace tandem {
namespace {

constexpr int kE8m0Bias = 127;
constexpr uint8_t kE8m0NaN = 255;

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
    const uint8_t exponent = scales[size_t(block - first_block)];
    if (exponent == kE8m0NaN) {
      throw IoError(fmt::format("{}: scale {} of tensor '{}' is NaN", slice.scales_file->path(),
                                block, slice.scales->name));
    }
    const float scale = std::ldexp(1.0f, int(exponent) - kE8m0Bias);
    for (; i < block_end; ++i) {
      const int byte = codes[size_t(i / 2 - begin / 2)];
      const auto code = uint32_t(i % 2 == 0 ? byte & 15 : byte >> 4);
      store(codec::E2M1::value<float>(code) * scale, out, i - begin);
    }
  }
}

/// Reads runs of a tile's columns, and writes parts of rows that are whole cache lines.
void read_transposed(const StoredSlice& slice, int64_t begin, const Tensor& out) {
  constexpr int64_t kTile = 16;
  const int64_t rows = out.dim(0), columns = out.dim(1), length = (rows - 1) * slice.row_stride + 1;
  cpu::parallel_tasks((columns + kTile - 1) / kTile, [&](int64_t tile) {
    const int64_t first = tile * kTile, count = std::min(kTile, columns - first);
    std::vector<float> runs(size_t(count * length));
    for (int64_t c = 0; c < count; ++c) {
      slice.file->read_f32(*slice.whole, begin + (first + c) * slice.column_stride,
                           std::span(runs).subspan(size_t(c * length), size_t(length)));
    }
    for (int64_t row = 0; row < rows; ++row) {
      for (int64_t c = 0; c < count; ++c) {
        store(runs[size_t(c * length + row * slice.row_stride)], out, row * columns + first + c);
      }
    }
  });
}

}  // namespace

bool is_transposed(const StoredSlice& slice) {
  return !slice.scales && slice.column_stride > slice.row_stride;
}

void read_slice(const StoredSlice& slice, int64_t row, int64_t column, const Tensor& out) {
  const int64_t rows = out.dim(0), columns = out.dim(1);
  const int64_t begin = slice.first + row * slice.row_stride + column * slice.column_stride;
  if (slice.scales) {
    for (int64_t r = 0; r < rows; ++r) {
      read_blocks(slice, begin + r * slice.row_stride, columns, out.rows(r, 1));
    }
    return;
  }
  if (is_transposed(slice) && rows > 1) return read_transposed(slice, begin, out);
  std::vector<float> run(size_t((columns - 1) * slice.column_stride + 1));
  for (int64_t r = 0; r < rows; ++r) {
    slice.file->read_f32(*slice.whole, begin + r * slice.row_stride, run);
    for (int64_t i = 0; i < columns; ++i) {
      store(run[size_t(i * slice.column_stride)], out, r * columns + i);
    }
  }
}

}  // namespace tandem
