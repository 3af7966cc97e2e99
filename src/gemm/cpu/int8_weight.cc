#include "gemm/int8_weight.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <utility>

#include "core/cpu/parallel.h"
#include "core/cpu/scalar.h"
#include "gemm/cpu/multiply_add.h"
#include "observe/recorder.h"
#include "tandem/error.h"

namespace tandem {
namespace {

// Sums of a tile: 16 for each of its outputs, in as many registers as they take.
#if defined(__AVX512F__)
constexpr int kInt8VectorBytes = 64, kInt8TileRows = 4, kInt8TileColumns = 4;  // 16 of 32 registers
#elif defined(__AVX__)
constexpr int kInt8VectorBytes = 32, kInt8TileRows = 2, kInt8TileColumns = 2;  // 8 of 16
#else
constexpr int kInt8VectorBytes = 16, kInt8TileRows = 1, kInt8TileColumns = 2;  // 8 of 16
#endif
constexpr int kSums = 16;
constexpr int kInt8Lanes = kInt8VectorBytes / int(sizeof(float));
constexpr int kVectors = kSums / kInt8Lanes;
using FloatVector = float __attribute__((vector_size(kInt8VectorBytes)));
using StoredFloats = float __attribute__((vector_size(kInt8VectorBytes), aligned(4), may_alias));

/// A vector of values in f32. Intrinsics, as GCC converts the bytes one by one; with a mask, as
/// GCC 12 warns about the others.
FloatVector int8_to_f32(const int8_t* values) {
#if defined(__AVX512F__)
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(values));
  return _mm512_maskz_cvtepi32_ps(0xffff, _mm512_maskz_cvtepi8_epi32(0xffff, bytes));
#elif defined(__AVX2__)
  const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(values));
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes));
#else
  FloatVector result;
  for (int lane = 0; lane < kInt8Lanes; ++lane) result[lane] = float(values[lane]);
  return result;
#endif
}

/// Min rows for which the weights of a tile's columns are decoded once: fewer read the bytes.
constexpr int64_t kMinDecodedRows = 3 * kInt8TileRows;

/// Keeps a vector in a register: GCC would read it again for each product.
void keep_in_register(FloatVector& vector) {
#if defined(__x86_64__)
  asm("" : "+v"(vector));
#else
  (void)vector;
#endif
}

/// Sum of kSums values: first of those 8 apart, then 4, 2 and 1.
float sum_lanes(const float* lanes) {
  using Eight = float __attribute__((vector_size(32), aligned(4), may_alias));
  using Four = float __attribute__((vector_size(16), aligned(4), may_alias));
  const Eight eight =
      *reinterpret_cast<const Eight*>(lanes) + *reinterpret_cast<const Eight*>(lanes + 8);
  const auto* const rest = reinterpret_cast<const float*>(&eight);
  const Four four = *reinterpret_cast<const Four*>(rest) + *reinterpret_cast<const Four*>(rest + 4);
  return (four[0] + four[2]) + (four[1] + four[3]);
}

/// Values of x that are read for each few columns of the weight: half of a core's second cache.
constexpr int64_t kBlockFloats = int64_t(1) << 17;

struct RowBlock {
  int64_t begin, end;
};

struct TileOperands {
  const float* x;  // [rows, groups x kInt8Group]
  const int8_t* values;
  const BFloat16* scales;
  int64_t groups;
  const float* decoded = nullptr;  // values x scales, [vectors of a column, columns, kInt8Lanes]
};

float bf16_at_least(float value) {
  return std::bit_cast<float>((std::bit_cast<uint32_t>(value) + 0xffff) & 0xffff0000u);
}

/// sums[i * Columns + j] = row i of x times row j of the weight, which is decoded if `IsDecoded`.
template <int Rows, int Columns, bool IsDecoded>
void int8_tile(const TileOperands& o, float* sums) {
  FloatVector total[Rows][Columns][kVectors] = {};
  const int64_t stride = o.groups * kInt8Group;
  for (int64_t group = 0; group < o.groups; ++group) {
    FloatVector scales[Columns] = {};
#pragma GCC unroll 4
    for (int j = 0; j < Columns && !IsDecoded; ++j) {
      scales[j] = FloatVector{} + cpu::to_f32(o.scales[j * o.groups + group]);
    }
#pragma GCC unroll 1
    for (int64_t k = group * kInt8Group; k < (group + 1) * kInt8Group; k += kSums) {
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) {
        const int64_t at = k + v * kInt8Lanes;
        FloatVector weights[Columns];
#pragma GCC unroll 4
        for (int j = 0; j < Columns; ++j) {
          if constexpr (IsDecoded) {
            weights[j] =
                *reinterpret_cast<const StoredFloats*>(o.decoded + at * Columns + j * kInt8Lanes);
          } else {
            weights[j] = scales[j] * int8_to_f32(o.values + j * stride + at);
          }
          keep_in_register(weights[j]);
        }
#pragma GCC unroll 4
        for (int i = 0; i < Rows; ++i) {
          FloatVector x = *reinterpret_cast<const StoredFloats*>(o.x + i * stride + at);
          keep_in_register(x);
#pragma GCC unroll 4
          for (int j = 0; j < Columns; ++j) {
            total[i][j][v] = cpu::multiply_add<FloatVector>(weights[j], x, total[i][j][v]);
          }
        }
      }
    }
  }
  for (int i = 0; i < Rows; ++i) {
    for (int j = 0; j < Columns; ++j) {
      std::array<float, kSums> lanes;
      std::memcpy(lanes.data(), total[i][j], sizeof lanes);
      sums[i * Columns + j] = sum_lanes(lanes.data());
    }
  }
}

using Int8Tile = void (*)(const TileOperands&, float*);
template <bool IsDecoded, int Rows, int... Column>
constexpr std::array<Int8Tile, kInt8TileColumns> int8_tiles_of(
    std::integer_sequence<int, Column...>) {
  return {int8_tile<Rows, Column + 1, IsDecoded>...};
}
template <bool IsDecoded, int... Row>
constexpr std::array<std::array<Int8Tile, kInt8TileColumns>, kInt8TileRows> all_int8_tiles(
    std::integer_sequence<int, Row...>) {
  return {
      int8_tiles_of<IsDecoded, Row + 1>(std::make_integer_sequence<int, kInt8TileColumns>{})...};
}
/// kInt8Tiles[is decoded][rows - 1][columns - 1].
constexpr std::array kInt8Tiles = {
    all_int8_tiles<false>(std::make_integer_sequence<int, kInt8TileRows>{}),
    all_int8_tiles<true>(std::make_integer_sequence<int, kInt8TileRows>{})};

/// Values x scales of `columns` rows of a weight.
void decode_columns(const TileOperands& o, int64_t columns, float* decoded) {
  const int64_t stride = o.groups * kInt8Group;
  for (int64_t column = 0; column < columns; ++column) {
    for (int64_t k = 0; k < stride; k += kInt8Lanes) {
      const BFloat16 scale = o.scales[column * o.groups + k / kInt8Group];
      *reinterpret_cast<StoredFloats*>(decoded + k * columns + column * kInt8Lanes) =
          (FloatVector{} + cpu::to_f32(scale)) * int8_to_f32(o.values + column * stride + k);
    }
  }
}

/// Memory of a thread for `count` floats, valid until its next call for the same `Use`.
template <typename Use>
float* thread_floats(int64_t count) {
  thread_local Memory memory;
  const size_t bytes = size_t(count) * sizeof(float);
  if (memory.bytes() < bytes) memory = Memory(bytes);
  return reinterpret_cast<float*>(memory.data());
}
struct PaddedRows;
struct DecodedColumns;

/// Rows of x in f32, dense, with zeros up to `columns`: x itself if it is that.
const float* padded_rows(const Tensor& x, int64_t columns) {
  const bool is_dense = x.dim(1) == columns && (x.dim(0) == 1 || x.stride(0) == columns);
  if (x.dtype() == DType::f32 && is_dense) return x.as<float>();
  float* const padded = thread_floats<PaddedRows>(x.dim(0) * columns);
  cpu::with_type(x.dtype(), "int8 product", [&]<typename T>(T) {
    for (int64_t row = 0; row < x.dim(0); ++row) {
      const T* from = x.as<T>() + row * x.stride(0);
      float* to = padded + row * columns;
      for (int64_t i = 0; i < x.dim(1); ++i) to[i] = cpu::to_f32(from[i]);
      std::fill(to + x.dim(1), to + columns, 0.0f);
    }
  });
  return padded;
}

}  // namespace

Int8Weight::Int8Weight(const Tensor& weight)
    : rows_(weight.dim(0)),
      columns_(weight.dim(1)),
      groups_((columns_ + kInt8Group - 1) / kInt8Group),
      values_(size_t(rows_ * groups_ * kInt8Group)),
      scales_(size_t(rows_ * groups_) * sizeof(BFloat16)) {
  auto* const values = reinterpret_cast<int8_t*>(values_.data());
  auto* const scales = reinterpret_cast<BFloat16*>(scales_.data());
  cpu::parallel_ranges(rows_ * groups_, cpu::kMinRows, [&](int64_t begin, int64_t end) {
    for (int64_t group = begin; group < end; ++group) {
      const int64_t first = group % groups_ * kInt8Group;
      const int64_t count = std::min(kInt8Group, columns_ - first);
      const float* const w = weight.as<float>() + group / groups_ * columns_ + first;
      float max = 0;
      for (int64_t i = 0; i < count; ++i) max = std::max(max, std::abs(w[i]));
      const float scale = bf16_at_least(max / 127);
      scales[group] = cpu::from_f32<BFloat16>(scale);
      if (scale == 0) continue;
      for (int64_t i = 0; i < count; ++i) {
        values[group * kInt8Group + i] =
            int8_t(std::clamp(std::nearbyint(w[i] / scale), -127.0f, 127.0f));
      }
    }
  });
}

void Int8Weight::read(const Tensor& to) const {
  const auto* const values = reinterpret_cast<const int8_t*>(values_.data());
  const auto* const scales = reinterpret_cast<const BFloat16*>(scales_.data());
  for (int64_t row = 0; row < rows_; ++row) {
    for (int64_t column = 0; column < columns_; ++column) {
      const int64_t group = row * groups_ + column / kInt8Group;
      to.as<float>()[row * to.stride(0) + column] =
          cpu::to_f32(scales[group]) * float(values[group * kInt8Group + column % kInt8Group]);
    }
  }
}

void Int8Weight::multiply(const Tensor& x, const Tensor& out, int64_t first_row) const {
  if (x.dims() != 2 || x.dim(1) != columns_) {
    throw InvalidArgument(
        fmt::format("int8 product: x is {}: expected {} columns", x.describe(), columns_));
  }
  const bool fits = out.dims() == 2 && out.dim(0) == x.dim(0) && first_row >= 0 &&
                    out.dim(1) <= rows_ - first_row;
  if (!fits) {
    throw InvalidArgument(
        fmt::format("int8 product: out is {}: expected {} rows and at most {} columns",
                    out.describe(), x.dim(0), rows_ - first_row));
  }
  const ScopedSpan span(SpanKind::compute, "int8 gemm");
  const int64_t stride = groups_ * kInt8Group;
  const float* const rows = padded_rows(x, stride);
  const auto* const values = reinterpret_cast<const int8_t*>(values_.data()) + first_row * stride;
  const auto* const scales =
      reinterpret_cast<const BFloat16*>(scales_.data()) + first_row * groups_;
  const int64_t block_rows = std::max<int64_t>(kMinDecodedRows, kBlockFloats / stride);
  const bool is_decoded = x.dim(0) >= kMinDecodedRows;
  const auto write = [&]<typename T>(T, RowBlock block, int64_t begin, int64_t end) {
    float* const decoded =
        is_decoded ? thread_floats<DecodedColumns>(kInt8TileColumns * stride) : nullptr;
    for (int64_t column = begin; column < end; column += kInt8TileColumns) {
      const int64_t columns = std::min<int64_t>(kInt8TileColumns, end - column);
      TileOperands operands{rows, values + column * stride, scales + column * groups_, groups_,
                            decoded};
      if (is_decoded) decode_columns(operands, columns, decoded);
      for (int64_t row = block.begin; row < block.end; row += kInt8TileRows) {
        const int64_t count = std::min<int64_t>(kInt8TileRows, block.end - row);
        std::array<float, kInt8TileRows * kInt8TileColumns> sums;
        operands.x = rows + row * stride;
        kInt8Tiles[is_decoded][size_t(count - 1)][size_t(columns - 1)](operands, sums.data());
        for (int64_t i = 0; i < count; ++i) {
          T* const to = out.as<T>() + (row + i) * out.stride(0) + column;
          for (int64_t j = 0; j < columns; ++j) {
            to[j] = cpu::from_f32<T>(sums[size_t(i * columns + j)]);
          }
        }
      }
    }
  };
  cpu::with_type(out.dtype(), "int8 product", [&]<typename T>(T type) {
    cpu::parallel_ranges(out.dim(1), cpu::kMinRows, [&](int64_t begin, int64_t end) {
      for (int64_t row = 0; row < x.dim(0); row += block_rows) {
        write(type, {row, std::min(row + block_rows, x.dim(0))}, begin, end);
      }
    });
  });
}

}  // namespace tandem
