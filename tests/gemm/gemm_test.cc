#include "gemm/gemm.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <thread>
#include <vector>

#include "tandem/error.h"
#include "tandem/random.h"

namespace tandem {
namespace {

float at(const Tensor& t, int64_t i, int64_t j) {
  const int64_t offset = i * t.stride(0) + j * t.stride(1);
  return t.dtype() == DType::f32 ? t.as<float>()[offset] : t.as<BFloat16>()[offset].to_float();
}

/// A [rows, columns] matrix, stored as [columns, rows] if `transposed`, with `padding` unused
/// elements after each stored row.
struct Matrix {
  Memory memory;
  Tensor tensor;
  Matrix(DType dtype, int64_t rows, int64_t columns, bool transposed, int64_t padding,
         uint64_t seed) {
    const int64_t num_outer = transposed ? columns : rows, length = transposed ? rows : columns;
    memory = Memory(size_t(num_outer * (length + padding)) * size_of(dtype));
    const Tensor all = memory.view(dtype, {num_outer, length + padding});
    for (int64_t i = 0; i < all.elements(); ++i) {
      const float value = normal(seed, 0, uint64_t(i));
      if (dtype == DType::f32) {
        all.as<float>()[i] = value;
      } else {
        all.as<BFloat16>()[i] = BFloat16::from_float(value);
      }
    }
    // A view of the first `length` columns: rows of the transpose.
    const Tensor narrow = all.transposed().rows(0, length).transposed();
    tensor = transposed ? narrow.transposed() : narrow;
  }
};

struct Case {
  int64_t m, n, k;
};

constexpr Case kCases[] = {{1, 1, 1},    {1, 17, 5},    {7, 1, 9},     {3, 5, 0},    {0, 5, 3},
                           {5, 0, 3},    {4, 4, 4},     {31, 33, 29},  {65, 48, 17}, {1, 64, 257},
                           {129, 3, 64}, {64, 96, 128}, {50, 257, 130}};

void check_case(const Case& c, DType in, DType out_type, int layout, bool with_bias,
                bool accumulate) {
  SCOPED_TRACE(fmt::format("m {} n {} k {} {}->{} layout {} bias {} accumulate {}", c.m, c.n, c.k,
                           name_of(in), name_of(out_type), layout, with_bias, accumulate));
  const int64_t padding = layout & 8 ? 3 : 0;
  const Matrix a(in, c.m, c.k, layout & 1, padding, 1), b(in, c.k, c.n, layout & 2, padding, 2);
  const Matrix out(out_type, c.m, c.n, layout & 4, padding, 3);
  const Matrix old(out_type, c.m, c.n, layout & 4, padding, 3);
  const Matrix bias(out_type, 1, c.n, false, 0, 4);
  const Tensor bias_row(bias.memory.data(), out_type, {c.n});
  gemm(a.tensor, b.tensor, out.tensor, {with_bias ? &bias_row : nullptr, accumulate});
  for (int64_t i = 0; i < c.m; ++i) {
    for (int64_t j = 0; j < c.n; ++j) {
      double sum = 0, magnitude = 0;
      for (int64_t l = 0; l < c.k; ++l) {
        const double term = double(at(a.tensor, i, l)) * double(at(b.tensor, l, j));
        sum += term, magnitude += std::abs(term);
      }
      if (with_bias) sum += at(bias.tensor, 0, j), magnitude += std::abs(at(bias.tensor, 0, j));
      if (accumulate) sum += at(old.tensor, i, j), magnitude += std::abs(at(old.tensor, i, j));
      // Accumulation error, then one (with sum post-op at most two) roundings of the result.
      const double rounding = out_type == DType::bf16 ? 0x1p-7 : 0x1p-22;
      const double bound = double(c.k + 2) * 0x1p-24 * magnitude + rounding * std::abs(sum) + 1e-30;
      ASSERT_NEAR(at(out.tensor, i, j), sum, bound) << "at " << i << ", " << j;
    }
  }
  if (padding && out.memory.bytes()) {  // padding stays untouched
    const int64_t num_outer = layout & 4 ? c.n : c.m, length = layout & 4 ? c.m : c.n;
    for (int64_t outer = 0; outer < num_outer; ++outer) {
      const size_t from = size_t(outer * (length + padding) + length) * size_of(out_type);
      ASSERT_EQ(0, std::memcmp(out.memory.data() + from, old.memory.data() + from,
                               size_t(padding) * size_of(out_type)));
    }
  }
}

class Gemm : public testing::TestWithParam<int> {};

TEST_P(Gemm, MatchesDoubleReference) {
  const int layout = GetParam();
  const std::pair<DType, DType> types[] = {
      {DType::f32, DType::f32}, {DType::bf16, DType::bf16}, {DType::bf16, DType::f32}};
  for (const Case& c : kCases) {
    for (const auto& [in, out] : types) {
      for (const bool bias : {false, true}) {
        for (const bool accumulate : {false, true}) {
          check_case(c, in, out, layout, bias, accumulate);
        }
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Layouts, Gemm, testing::Range(0, 16));

// Allows operators to split rows into chunks of any size without changing a bit.
TEST(GemmRuns, RowsHaveTheSameBitsForAnySplit) {
  if (!rows_keep_bits()) GTEST_SKIP() << "needs AVX-512";
  const Case cases[] = {{65, 48, 33},   {40, 257, 64},  {96, 1, 100},
                        {130, 64, 700}, {24, 16, 4100}, {7, 57, 40}};
  for (const int threads : {1, 2}) {
    set_kernel_threads(threads);
    for (const Case& c : cases) {
      for (int layout = 0; layout < 16; ++layout) {
        for (const DType in : {DType::f32, DType::bf16}) {
          const bool f32_out = in == DType::f32 || layout % 3 == 0, with_bias = layout % 2;
          const DType out_type = f32_out ? DType::f32 : DType::bf16;
          const int64_t padding = layout & 8 ? 3 : 0;
          SCOPED_TRACE(
              fmt::format("m {} n {} k {} {} layout {}", c.m, c.n, c.k, name_of(in), layout));
          const Matrix a(in, c.m, c.k, false, layout & 1 ? padding : 0, 1);
          const Matrix b(in, c.k, c.n, layout & 2, layout & 1 ? 0 : padding, 2);
          const Matrix bias(out_type, 1, c.n, false, 0, 3);
          const Tensor bias_row(bias.memory.data(), out_type, {c.n});
          const GemmOptions options{with_bias ? &bias_row : nullptr, bool(layout & 4)};
          const Matrix whole(out_type, c.m, c.n, false, padding, 4);
          gemm(a.tensor, b.tensor, whole.tensor, options);
          for (const int64_t chunk : {1, 2, 5, 8, 16, 31}) {
            const Matrix blocks(out_type, c.m, c.n, false, padding, 4);
            for (int64_t row = 0; row < c.m; row += chunk) {
              const int64_t count = std::min(chunk, c.m - row);
              gemm(a.tensor.rows(row, count), b.tensor, blocks.tensor.rows(row, count), options);
            }
            ASSERT_EQ(0,
                      std::memcmp(whole.memory.data(), blocks.memory.data(), whole.memory.bytes()))
                << chunk << " rows at a time, " << threads << " threads";
          }
        }
      }
    }
  }
}

TEST(GemmRuns, SameBitsOfFewRowsAreAtMostTheirLimit) {
  if (!rows_keep_bits()) GTEST_SKIP() << "needs AVX-512";
  const Matrix a(DType::f32, kMaxFewRows + 1, 24, false, 0, 1), b(DType::f32, 24, 16, true, 0, 2);
  const Matrix some(DType::f32, kMaxFewRows + 1, 16, false, 0, 3);
  const Matrix all(DType::f32, kMaxFewRows + 1, 16, false, 0, 3);
  gemm(Exec{}, a.tensor, b.tensor, all.tensor, {.same_bits = SameBits::many_rows});
  gemm(Exec{}, a.tensor.rows(1, kMaxFewRows), b.tensor, some.tensor.rows(0, kMaxFewRows),
       {.same_bits = SameBits::few_rows});
  EXPECT_EQ(std::memcmp(some.tensor.data(), all.tensor.rows(1, kMaxFewRows).data(),
                        size_t(kMaxFewRows) * 16 * sizeof(float)),
            0);
  try {
    gemm(Exec{}, a.tensor, b.tensor, some.tensor, {.same_bits = SameBits::few_rows});
    ADD_FAILURE() << "65 rows: accepted";
  } catch (const InvalidArgument& error) {
    EXPECT_STREQ(error.what(),
                 "gemm: a f32[65, 24] with same_bits of few rows: expected at most 64");
  }
}

// A long K, which libraries cut so that blocks of its rows fit into a cache.
TEST(GemmRuns, RowsHaveTheSameBitsForEveryNumberOfRows) {
  if (!rows_keep_bits()) GTEST_SKIP() << "needs AVX-512";
  constexpr int64_t kRows = 66, kColumns = 72, kDepth = 8192;
  for (const int threads : {1, 2}) {
    set_kernel_threads(threads);
    for (int layout = 0; layout < 8; ++layout) {
      const DType in = layout & 1 ? DType::bf16 : DType::f32;
      const DType out_type = layout & 2 ? in : DType::f32;
      if (in == DType::f32 && layout & 2) continue;
      const Matrix a(in, kRows, kDepth, false, 0, 1), b(in, kDepth, kColumns, layout & 4, 0, 2);
      const Matrix whole(out_type, kRows, kColumns, false, 0, 3);
      gemm(a.tensor, b.tensor, whole.tensor);
      for (int64_t rows = 1; rows < kRows; rows += threads == 1 ? 1 : 8) {
        const Matrix few(out_type, rows, kColumns, false, 0, 4);
        const int64_t first = kRows - rows;
        gemm(a.tensor.rows(first, rows), b.tensor, few.tensor);
        ASSERT_EQ(0, std::memcmp(few.tensor.data(), whole.tensor.rows(first, rows).data(),
                                 few.memory.bytes()))
            << rows << " rows of layout " << layout << ", " << threads << " threads";
      }
    }
  }
  set_kernel_threads(1);
}

TEST(GemmRuns, AreBitwiseEqualOnEveryThread) {
  const Matrix a(DType::bf16, 77, 130, false, 0, 1), b(DType::bf16, 130, 65, true, 0, 2);
  const Matrix first(DType::f32, 77, 65, false, 0, 3);
  gemm(a.tensor, b.tensor, first.tensor);
  std::vector<std::thread> threads;
  for (int t = 0; t < 3; ++t) {
    threads.emplace_back([&] {
      for (int run = 0; run < 20; ++run) {
        const Matrix out(DType::f32, 77, 65, false, 0, uint64_t(run));
        gemm(a.tensor, b.tensor, out.tensor);
        EXPECT_EQ(0, std::memcmp(out.memory.data(), first.memory.data(), out.tensor.bytes()));
      }
    });
  }
  for (auto& thread : threads) thread.join();
}

TEST(GemmErrors, NameTheOperand) {
  float data[64] = {};
  const Tensor a(data, DType::f32, {2, 3}), b(data, DType::f32, {3, 4}),
      out(data, DType::f32, {2, 4});
  const auto message = [](const Tensor& x, const Tensor& y, const Tensor& z,
                          const GemmOptions& options = {}) -> std::string {
    try {
      gemm(x, y, z, options);
    } catch (const InvalidArgument& error) {
      return error.what();
    }
    return "";
  };
  EXPECT_EQ(message(a, a, out), "gemm: b is f32[2, 3]: expected 3 rows, as a is f32[2, 3]");
  EXPECT_EQ(message(a, b, a), "gemm: out is f32[2, 3]: expected [2, 4]");
  EXPECT_EQ(message(a, Tensor(data, DType::bf16, {3, 4}), out),
            "gemm: b is bf16[3, 4]: expected the dtype of a, f32[2, 3]");
  const Tensor short_bias(data, DType::f32, {3});
  EXPECT_EQ(message(a, b, out, {&short_bias}), "gemm: bias is f32[3]: expected f32[4]");
  const Tensor column = Tensor(data, DType::f32, {4, 2, 2}).transposed();
  EXPECT_NE(message(column, b, out), "");
  EXPECT_THROW(set_kernel_threads(0), InvalidArgument);
}

TEST(KernelThreads, EndsWithTheThreadsBefore) {
  set_kernel_threads(2);
  {
    const KernelThreads outer(3);
    EXPECT_EQ(kernel_threads(), 3);
    EXPECT_THROW(KernelThreads(0), InvalidArgument);
    {
      const KernelThreads inner(1);
      EXPECT_EQ(kernel_threads(), 1);
    }
    EXPECT_EQ(kernel_threads(), 3);
    std::thread([] { EXPECT_NO_THROW(KernelThreads(4)); }).join();
    EXPECT_EQ(kernel_threads(), 3);
  }
  EXPECT_EQ(kernel_threads(), 2);
  set_kernel_threads(1);
}

}  // namespace
}  // namespace tandem
