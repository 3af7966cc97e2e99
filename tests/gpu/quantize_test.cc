// Quantization to e4m3 rows and columns (codec/quantize.h) on a GPU: the CPU's bits.
#include <cmath>
#include <limits>
#include <span>
#include <vector>

#include "codec/quantize.h"
#include "gemm/quantized_gemm.h"
#include "tandem/random.h"
#include "tests/gpu/kernel_operands.h"

namespace tandem::test {
namespace {

class QuantizeKernels : public OnGpus {};

struct Extents2 {
  int64_t rows, columns;
};
/// Rows of one group to more than registers hold, and columns of less than a tile to many tiles.
constexpr Extents2 kExtents[] = {{16, 16},    {48, 80},    {16, 4096},  {128, 64},
                                 {144, 4112}, {272, 8192}, {16, 16400}, {32, 36864},
                                 {1040, 208}, {0, 32},     {2064, 1040}};

std::vector<Operand> operands(DType dtype, const Extents2& e, bool by_columns) {
  const auto [rows, columns] = by_columns ? Extents2{e.columns, e.rows} : e;
  return {matrix("x", dtype, e.rows, e.columns), exact(matrix("codes", DType::e4m3, rows, columns)),
          exact(vector("scales", DType::f32, rows))};
}

TEST_P(QuantizeKernels, RowsAndColumnsHaveTheCpusBits) {
  run([](Communicator& comm) {
    for (const Extents2& e : kExtents) {
      for (const DType dtype : kDTypes) {
        expect_equal(
            comm, "quantize_rows", operands(dtype, e, false),
            [](const Exec& exec, const TensorList& t) { quantize_rows(exec, t[0], t[1], t[2]); });
      }
      expect_equal(
          comm, "quantize_columns", operands(DType::bf16, e, true),
          [](const Exec& exec, const TensorList& t) { quantize_columns(exec, t[0], t[1], t[2]); });
    }
  });
}

/// Rows and columns of very different magnitudes, of zeros, of tiny values, and with an infinity or
/// NaN.
std::vector<BFloat16> special_values(int64_t rows, int64_t columns) {
  std::vector<BFloat16> values(size_t(rows * columns));
  for (int64_t i = 0; i < rows * columns; ++i) {
    const int64_t row = i / columns, column = i % columns;
    float value = std::ldexp(normal(7, 1, uint64_t(i)), int(row % 31) * 8 - 120);
    if (row == 3 || column == 5) value = 0;
    if (row == 7) value = 1e-38f;
    if (row == 9 && column == 11) value = std::numeric_limits<float>::infinity();
    if (row == 10 && column == 12) value = std::nanf("");
    if (row == 11) value *= 0x1p100f;  // some are infinite
    values[size_t(i)] = BFloat16::from_float(value);
  }
  return values;
}

TEST_P(QuantizeKernels, ZeroTinyHugeAndNonfiniteRowsHaveTheCpusBits) {
  run([](Communicator& comm) {
    const Exec exec{device_of(comm), stream_of(comm)};
    constexpr int64_t kRows = 160, kColumns = 96;
    std::vector<BFloat16> values = special_values(kRows, kColumns);
    const Tensor x(values.data(), DType::bf16, {kRows, kColumns});
    const Memory there(x.bytes(), exec.device);
    const Tensor x_there = there.view(DType::bf16, {kRows, kColumns});
    copy(exec, x, x_there);
    for (const bool by_columns : {false, true}) {
      const int64_t rows = by_columns ? kColumns : kRows, columns = by_columns ? kRows : kColumns;
      const auto quantize = [&](const Exec& where, const Tensor& from, const Memory& codes,
                                const Memory& scales) {
        (by_columns ? quantize_columns : static_cast<decltype(&quantize_columns)>(quantize_rows))(
            where, from, codes.view(DType::e4m3, {rows, columns}), scales.view(DType::f32, {rows}));
      };
      const Memory codes(size_t(rows * columns)), scales(size_t(rows) * 4),
          gpu_codes(codes.bytes(), exec.device), gpu_scales(scales.bytes(), exec.device),
          found_codes(codes.bytes()), found_scales(scales.bytes());
      quantize(Exec{}, x, codes, scales);
      quantize(exec, x_there, gpu_codes, gpu_scales);
      copy(exec, all_bytes(gpu_codes), all_bytes(found_codes));
      copy(exec, all_bytes(gpu_scales), all_bytes(found_scales));
      int64_t others = 0;
      for (int64_t i = 0; i < rows * columns; ++i) {
        const auto code = [&](const Memory& of) { return uint8_t(of.data()[i]) & 0x7f; };
        const bool are_nan = code(codes) == 0x7f && code(found_codes) == 0x7f;
        others += !are_nan && codes.data()[i] != found_codes.data()[i];
      }
      EXPECT_EQ(others, 0) << by_columns;
      EXPECT_EQ(std::memcmp(scales.data(), found_scales.data(), scales.bytes()), 0) << by_columns;
    }
  });
}

/// Codes and scales of random rows of different magnitudes, here and on the GPU.
struct Rows {
  Rows(const Exec& exec, int64_t rows, int64_t columns, uint64_t seed)
      : codes(size_t(rows * columns)),
        scales(size_t(rows) * 4),
        gpu_codes(codes.bytes(), exec.device),
        gpu_scales(scales.bytes(), exec.device),
        here{codes.view(DType::e4m3, {rows, columns}), scales.view(DType::f32, {rows})},
        there{gpu_codes.view(DType::e4m3, {rows, columns}), gpu_scales.view(DType::f32, {rows})} {
    std::vector<float> values(size_t(rows * columns));
    for (int64_t i = 0; i < rows * columns; ++i) {
      values[size_t(i)] = std::ldexp(normal(seed, 1, uint64_t(i)), int(i / columns % 5) * 3);
    }
    quantize_rows(Exec{}, Tensor::of(std::span(values), {rows, columns}), here.codes, here.scales);
    copy(exec, all_bytes(codes), all_bytes(gpu_codes));
    copy(exec, all_bytes(scales), all_bytes(gpu_scales));
  }
  /// Norm of the values of a row.
  double norm(int64_t row) const {
    double squares = 0;
    for (int64_t i = 0; i < here.codes.dim(1); ++i) {
      const float code = here.codes.as<Float8E4M3>()[row * here.codes.dim(1) + i].to_float();
      squares += double(code) * double(code);
    }
    return std::sqrt(squares) * double(here.scales.as<float>()[row]);
  }
  Memory codes, scales, gpu_codes, gpu_scales;
  QuantizedRows here, there;
};

// Hopper adds 128 products in 14 bits before the sum is promoted to f32: a sum of K products of
// random signs is off by at most a few of these units of its size, |a| |b|; in bf16 each of the
// two sums is rounded, too.
void expect_gemm_of_cpu(const Exec& exec, int64_t m, int64_t n, int64_t k, DType dtype) {
  const Rows a(exec, m, k, 1), b(exec, n, k, 2);
  const Operand operand = matrix("out", dtype, m, n);
  const Memory out(operand.bytes()), there(out.bytes(), exec.device), found(out.bytes());
  for (const bool accumulate : {false, true}) {
    gemm(Exec{}, a.here, b.here, operand.view(out), accumulate);
    gemm(exec, a.there, b.there, operand.view(there), accumulate);
  }
  copy(exec, all_bytes(there), all_bytes(found));
  double worst = 0;
  for (int64_t i = 0; i < m * n; ++i) {
    const double expected = value_at(operand, out, operand.begin() + i),
                 value = value_at(operand, found, operand.begin() + i);
    const double rounded = dtype == DType::f32 ? 0 : 3 * bf16_unit(expected);
    const double bound = 0x1p-10 * a.norm(i / n) * b.norm(i % n) + rounded;
    worst = std::max(worst, std::abs(value - expected) / bound);
  }
  EXPECT_LE(worst, 1) << m << " x " << n << " x " << k << " " << name_of(dtype);
}

TEST_P(QuantizeKernels, GemmOfRowsMatchesTheCpuAndIsAdded) {
  run([](Communicator& comm) {
    const Exec exec{device_of(comm), stream_of(comm)};
    for (const DType dtype : kDTypes) {
      expect_gemm_of_cpu(exec, 64, 48, 144, dtype);
      expect_gemm_of_cpu(exec, 96, 128, 2048, dtype);
      expect_gemm_of_cpu(exec, 16, 16, 16, dtype);
      expect_gemm_of_cpu(exec, 1040, 272, 4096, dtype);
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Gpu, QuantizeKernels, ::testing::Values(1));

}  // namespace
}  // namespace tandem::test
