#include "gemm/cpu/coded_product.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cfloat>
#include <cmath>
#include <cstring>
#include <utility>

#include "core/cpu/parallel.h"
#include "core/cpu/scalar.h"
#include "gemm/cpu/multiply_add.h"
#include "observe/recorder.h"

namespace tandem {
namespace {

// Sums of a tile: 16 for each of its outputs, in as many registers as they take.
#if defined(__AVX512F__)
constexpr int kCodedVectorBytes = 64, kCodedTileRows = 4,
              kCodedTileColumns = 4;  // 16 of 32 registers
#elif defined(__AVX__)
constexpr int kCodedVectorBytes = 32, kCodedTileRows = 2, kCodedTileColumns = 2;  // 8 of 16
#else
constexpr int kCodedVectorBytes = 16, kCodedTileRows = 1, kCodedTileColumns = 2;  // 8 of 16
#endif
constexpr int kSums = 16;
constexpr int kCodedLanes = kCodedVectorBytes / int(sizeof(float));
constexpr int kVectors = kSums / kCodedLanes;
using FloatVector = float __attribute__((vector_size(kCodedVectorBytes)));
using StoredFloats = float __attribute__((vector_size(kCodedVectorBytes), aligned(4), may_alias));

template <WeightFormat>
struct Codes;

/// Vectors of codes in f32. Intrinsics, as GCC converts the bytes one by one; with a mask, as GCC
/// 12 warns about the others.
template <>
struct Codes<WeightFormat::int8> {
  using Scale = BFloat16;
  static constexpr float kUnit = 1;

  static FloatVector vector(const uint8_t* codes) {
#if defined(__AVX512F__)
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes));
    return _mm512_maskz_cvtepi32_ps(0xffff, _mm512_maskz_cvtepi8_epi32(0xffff, bytes));
#elif defined(__AVX2__)
    const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes));
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes));
#else
    FloatVector result;
    for (int lane = 0; lane < kCodedLanes; ++lane) result[lane] = value(codes[lane]);
    return result;
#endif
  }
  static float value(uint8_t code) {
    return float(int8_t(code));
  }
  static float scale_of(float max) {
    return std::bit_cast<float>((std::bit_cast<uint32_t>(max / 127) + 0xffff) & 0xffff0000u);
  }
  static uint8_t code_of(float weight, float scale) {
    if (scale == 0) return 0;
    return uint8_t(int8_t(std::clamp(std::nearbyint(weight / scale), -127.0f, 127.0f)));
  }
};

/// As f16 a code shifted by 7 bits is its number / 256, also if that is subnormal in f16.
template <>
struct Codes<WeightFormat::e4m3> {
  using Scale = float;
  static constexpr float kUnit = 256;

  static FloatVector vector(const uint8_t* codes) {
#if defined(__AVX512F__) && defined(__F16C__)
    const __m256i wide =
        _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes)));
    const __m256i halves =
        _mm256_or_si256(_mm256_slli_epi16(_mm256_and_si256(wide, _mm256_set1_epi16(0x7f)), 7),
                        _mm256_slli_epi16(_mm256_and_si256(wide, _mm256_set1_epi16(0x80)), 8));
    return _mm512_maskz_cvtph_ps(0xffff, halves);
#elif defined(__AVX2__) && defined(__F16C__)
    const __m128i wide =
        _mm_cvtepu8_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes)));
    return _mm256_cvtph_ps(
        _mm_or_si128(_mm_slli_epi16(_mm_and_si128(wide, _mm_set1_epi16(0x7f)), 7),
                     _mm_slli_epi16(_mm_and_si128(wide, _mm_set1_epi16(0x80)), 8)));
#else
    FloatVector result;
    for (int lane = 0; lane < kCodedLanes; ++lane) result[lane] = value(codes[lane]) / kUnit;
    return result;
#endif
  }
  static float value(uint8_t code) {
    return Float8E4M3{code}.to_float();
  }
  static float scale_of(float max) {
    return std::max(max / Float8E4M3::kMax, FLT_MIN);
  }
  static uint8_t code_of(float weight, float scale) {
    return Float8E4M3::from_float(weight / scale).bits;
  }
};

/// Calls body(Codes<format>{}).
template <typename Body>
void with_codes(WeightFormat format, const Body& body) {
  format == WeightFormat::int8 ? body(Codes<WeightFormat::int8>())
                               : body(Codes<WeightFormat::e4m3>());
}

/// Min rows for which the weights of a tile's columns are decoded once: fewer read the bytes.
constexpr int64_t kMinDecodedRows = 3 * kCodedTileRows;

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

/// A tile's operands. kGroup: inputs that share a scale; kUnit: a code is its vector's times that.
template <WeightFormat kFormat>
struct TileOperands {
  using Format = Codes<kFormat>;
  static constexpr int64_t kGroup = group_of(kFormat);

  const float* x;  // [rows, groups x kGroup]
  const uint8_t* codes;
  const Format::Scale* scales;
  int64_t groups;
  const float* decoded = nullptr;  // codes x scales, [vectors of a column, columns, kCodedLanes]

  /// Multiple of codes' vectors in a group of a column.
  float scale(int64_t column, int64_t group) const {
    return Format::kUnit * cpu::to_f32(scales[column * groups + group]);
  }
};

/// sums[i * Columns + j] = row i of x times row j of the weight, which is decoded if `IsDecoded`.
template <int Rows, int Columns, bool IsDecoded, WeightFormat kFormat>
void coded_tile(const TileOperands<kFormat>& o, float* sums) {
  constexpr int64_t kGroup = group_of(kFormat);
  FloatVector total[Rows][Columns][kVectors] = {};
  const int64_t stride = o.groups * kGroup;
  for (int64_t group = 0; group < o.groups; ++group) {
    FloatVector scales[Columns] = {};
#pragma GCC unroll 4
    for (int j = 0; j < Columns && !IsDecoded; ++j) {
      scales[j] = FloatVector{} + o.scale(j, group);
    }
#pragma GCC unroll 1
    for (int64_t k = group * kGroup; k < (group + 1) * kGroup; k += kSums) {
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) {
        const int64_t at = k + v * kCodedLanes;
        FloatVector weights[Columns];
#pragma GCC unroll 4
        for (int j = 0; j < Columns; ++j) {
          if constexpr (IsDecoded) {
            weights[j] =
                *reinterpret_cast<const StoredFloats*>(o.decoded + at * Columns + j * kCodedLanes);
          } else {
            weights[j] = scales[j] * Codes<kFormat>::vector(o.codes + j * stride + at);
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

template <WeightFormat kFormat>
using CodedTile = void (*)(const TileOperands<kFormat>&, float*);
template <WeightFormat kFormat, bool IsDecoded, int Rows, int... Column>
constexpr std::array<CodedTile<kFormat>, kCodedTileColumns> coded_tiles_of(
    std::integer_sequence<int, Column...>) {
  return {coded_tile<Rows, Column + 1, IsDecoded, kFormat>...};
}
template <WeightFormat kFormat, bool IsDecoded, int... Row>
constexpr std::array<std::array<CodedTile<kFormat>, kCodedTileColumns>, kCodedTileRows>
all_coded_tiles(std::integer_sequence<int, Row...>) {
  return {coded_tiles_of<kFormat, IsDecoded, Row + 1>(
      std::make_integer_sequence<int, kCodedTileColumns>{})...};
}
/// kCodedTiles[is decoded][rows - 1][columns - 1].
template <WeightFormat kFormat>
constexpr std::array kCodedTiles = {
    all_coded_tiles<kFormat, false>(std::make_integer_sequence<int, kCodedTileRows>{}),
    all_coded_tiles<kFormat, true>(std::make_integer_sequence<int, kCodedTileRows>{})};

/// Codes x scales of `columns` rows of a weight.
template <WeightFormat kFormat>
void decode_columns(const TileOperands<kFormat>& o, int64_t columns, float* decoded) {
  const int64_t stride = o.groups * o.kGroup;
  for (int64_t column = 0; column < columns; ++column) {
    for (int64_t k = 0; k < stride; k += kCodedLanes) {
      *reinterpret_cast<StoredFloats*>(decoded + k * columns + column * kCodedLanes) =
          (FloatVector{} + o.scale(column, k / o.kGroup)) *
          Codes<kFormat>::vector(o.codes + column * stride + k);
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
  cpu::with_type(x.dtype(), "coded product", [&]<typename T>(T) {
    for (int64_t row = 0; row < x.dim(0); ++row) {
      const T* from = x.as<T>() + row * x.stride(0);
      float* to = padded + row * columns;
      for (int64_t i = 0; i < x.dim(1); ++i) to[i] = cpu::to_f32(from[i]);
      std::fill(to + x.dim(1), to + columns, 0.0f);
    }
  });
  return padded;
}

/// Writes columns [begin, end) of the product of a block of rows.
template <WeightFormat kFormat, typename T>
void write_product(const TileOperands<kFormat>& whole, const Tensor& out, bool accumulate,
                   RowBlock block, int64_t begin, int64_t end) {
  const int64_t stride = whole.groups * whole.kGroup;
  const bool is_decoded = out.dim(0) >= kMinDecodedRows;
  float* const decoded =
      is_decoded ? thread_floats<DecodedColumns>(kCodedTileColumns * stride) : nullptr;
  for (int64_t column = begin; column < end; column += kCodedTileColumns) {
    const int64_t columns = std::min<int64_t>(kCodedTileColumns, end - column);
    TileOperands<kFormat> operands{whole.x, whole.codes + column * stride,
                                   whole.scales + column * whole.groups, whole.groups, decoded};
    if (is_decoded) decode_columns(operands, columns, decoded);
    for (int64_t row = block.begin; row < block.end; row += kCodedTileRows) {
      const int64_t count = std::min<int64_t>(kCodedTileRows, block.end - row);
      std::array<float, kCodedTileRows * kCodedTileColumns> sums;
      operands.x = whole.x + row * stride;
      kCodedTiles<kFormat>[is_decoded][size_t(count - 1)][size_t(columns - 1)](operands,
                                                                               sums.data());
      for (int64_t i = 0; i < count; ++i) {
        T* const to = out.as<T>() + (row + i) * out.stride(0) + column;
        for (int64_t j = 0; j < columns; ++j) {
          const float sum = sums[size_t(i * columns + j)];
          to[j] = cpu::from_f32<T>(accumulate ? cpu::to_f32(to[j]) + sum : sum);
        }
      }
    }
  }
}

template <WeightFormat kFormat>
void multiply_coded(const CodedMatrix& weight, const Tensor& x, const Tensor& out,
                    const CodedOptions& options) {
  using Scale = Codes<kFormat>::Scale;
  const int64_t groups = weight.groups(), stride = groups * group_of(kFormat);
  const TileOperands<kFormat> operands{
      padded_rows(x, stride), weight.codes.as<uint8_t>() + options.first_row * stride,
      weight.scales.as<Scale>() + options.first_row * groups, groups};
  const int64_t block_rows = std::max<int64_t>(kMinDecodedRows, kBlockFloats / stride);
  cpu::with_type(out.dtype(), "coded product", [&]<typename T>(T) {
    cpu::parallel_ranges(out.dim(1), cpu::kMinRows, [&](int64_t begin, int64_t end) {
      for (int64_t row = 0; row < x.dim(0); row += block_rows) {
        write_product<kFormat, T>(operands, out, options.accumulate,
                                  {row, std::min(row + block_rows, x.dim(0))}, begin, end);
      }
    });
  });
}

template <WeightFormat kFormat>
void quantize_group(const float* weights, int64_t count, uint8_t* codes,
                    typename Codes<kFormat>::Scale& stored) {
  float max = 0;
  for (int64_t i = 0; i < count; ++i) max = std::max(max, std::abs(weights[i]));
  const float scale = Codes<kFormat>::scale_of(max);
  stored = cpu::from_f32<typename Codes<kFormat>::Scale>(scale);
  for (int64_t i = 0; i < count; ++i) codes[i] = Codes<kFormat>::code_of(weights[i], scale);
}

}  // namespace

void cpu::quantize(const Tensor& weight, const CodedMatrix& to) {
  const int64_t groups = to.groups(), size = group_of(to.format);
  with_codes(to.format, [&]<WeightFormat kFormat>(Codes<kFormat>) {
    auto* const scales = to.scales.as<typename Codes<kFormat>::Scale>();
    cpu::parallel_ranges(to.rows * groups, cpu::kMinRows, [&](int64_t begin, int64_t end) {
      for (int64_t group = begin; group < end; ++group) {
        const int64_t first = group % groups * size;
        const float* const from = weight.as<float>() + group / groups * to.columns + first;
        quantize_group<kFormat>(from, std::min(size, to.columns - first),
                                to.codes.as<uint8_t>() + group * size, scales[group]);
      }
    });
  });
}

void cpu::read(const CodedMatrix& weight, const Tensor& to) {
  const int64_t groups = weight.groups(), size = group_of(weight.format);
  with_codes(weight.format, [&]<WeightFormat kFormat>(Codes<kFormat>) {
    const auto* const scales = weight.scales.as<typename Codes<kFormat>::Scale>();
    for (int64_t row = 0; row < weight.rows; ++row) {
      for (int64_t column = 0; column < weight.columns; ++column) {
        const int64_t group = row * groups + column / size;
        const uint8_t code = weight.codes.as<uint8_t>()[group * size + column % size];
        to.as<float>()[row * weight.columns + column] =
            cpu::to_f32(scales[group]) * Codes<kFormat>::value(code);
      }
    }
  });
}

void cpu::multiply(const CodedMatrix& weight, const Tensor& x, const Tensor& out,
                   const CodedOptions& options) {
  const ScopedSpan span(SpanKind::compute, "coded gemm");
  with_codes(weight.format, [&]<WeightFormat kFormat>(Codes<kFormat>) {
    multiply_coded<kFormat>(weight, x, out, options);
  });
}

}  // namespace tandem
