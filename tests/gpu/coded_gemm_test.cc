// Coded weights on a GPU against those on the CPU: codes, scales and products of few rows.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <initializer_list>
#include <string>
#include <utility>
#include <vector>

#include "gemm/coded_weight.h"
#include "gemm/cuda/coded_gemm.h"
#include "kernels/swiglu.h"
#include "tandem/error.h"
#include "tests/gpu/kernel_operands.h"
#include "tests/kernels/paged_cases.h"

namespace tandem::test {
namespace {

constexpr WeightFormat kFormats[] = {WeightFormat::int8, WeightFormat::e4m3};

class CodedGemm : public OnGpus {
 protected:
  void on_hopper(const std::function<void(const Exec&, Communicator&)>& body) {
    run([&](Communicator& comm) {
      const Exec exec{device_of(comm), stream_of(comm)};
      if (!gpu::has_coded_gemm()) GTEST_SKIP() << "needs a Hopper GPU";
      body(exec, comm);
    });
  }
};

Values on_host(const Exec& exec, const Values& device, std::initializer_list<int64_t> shape) {
  Values result(Exec{}, device.view.dtype(), shape);
  copy(exec, all_bytes_of(device.memory), all_bytes_of(result.memory));
  return result;
}

CodedWeight coded(const Exec& exec, WeightFormat format, const Tensor& weight) {
  CodedWeight result(exec, format, weight.dim(0), weight.dim(1));
  result.quantize(exec, weight);
  wait(exec);  // products read codes early
  return result;
}

/// Groups of zeros, of one outlier, of all exponents and of one magnitude; other values are random.
Values extreme_weights(int64_t rows, int64_t columns, uint64_t seed) {
  Values weight = random_values(DType::f32, rows, columns, seed);
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t i = 0; i < columns; ++i) {
      const int64_t at = row * columns + i;
      const double sign = i % 2 == 0 ? 1 : -1;
      if (row % 7 == 1) weight.set(at, 0);
      if (row % 7 == 2) weight.set(at, i % 64 == 5 ? 3e4 : weight.get(at) * 1e-6);
      if (row % 7 == 3) weight.set(at, sign * std::ldexp(1.7, -int(i * 5 % 149)));
      if (row % 7 == 4) weight.set(at, sign * 1e38);
      if (row % 7 == 5) weight.set(at, weight.get(at) * 1e-40);
    }
  }
  return weight;
}

TEST_P(CodedGemm, WeightsAreTheCpus) {
  on_hopper([](const Exec& exec, Communicator&) {
    uint64_t trial = 0;
    for (const WeightFormat format : kFormats) {
      for (const int64_t rows : {1, 3, 130}) {
        for (const int64_t columns : {1, 8, 63, 64, 65, 127, 128, 129, 200, 1030}) {
          const Values weight = extreme_weights(rows, columns, ++trial);
          const Values on_gpu = on_device(exec, weight, {rows, columns});
          const Values expected(Exec{}, DType::f32, {rows, columns});
          coded({}, format, weight.view).read({}, expected.view);
          const CodedWeight codes = coded(exec, format, on_gpu.view);
          for (const DType dtype : kDTypes) {
            const Values read(exec, dtype, {rows, columns});
            codes.read(exec, read.view);
            const Values found = on_host(exec, read, {rows, columns});
            for (int64_t i = 0; i < rows * columns; ++i) {
              const auto value = float(expected.get(i));
              const float rounded =
                  dtype == DType::f32 ? value : BFloat16::from_float(value).to_float();
              ASSERT_EQ(float(found.get(i)), rounded)
                  << name_of(format) << " " << rows << " x " << columns << " " << i;
            }
          }
        }
      }
    }
  });
}

/// Rows of a weight that has each code of a format at each input.
constexpr int64_t kRowsOfCodes = 520;

/// Weight whose scales are 1: all codes of a format but NaN, of both signs, at each input.
Values all_codes(WeightFormat format, int64_t columns) {
  Values weight(Exec{}, DType::f32, {kRowsOfCodes, columns});
  for (int64_t row = 0; row < kRowsOfCodes; ++row) {
    for (int64_t i = 0; i < columns; ++i) {
      double value;
      if (format == WeightFormat::int8) {  // 127 in each group
        value = double(i % 64 == row % 64 ? 127 : (i + row) % 255 - 127);
      } else {  // 448 in each group
        const int64_t code = (i + row) % 127, exponent = code / 8, mantissa = code % 8;
        const double steps = double(exponent == 0 ? mantissa : 8 + mantissa);
        value = std::ldexp(steps, int(std::max<int64_t>(exponent, 1)) - 10);
        if (row % 2 == 1) value = -value;
      }
      weight.set(row * columns + i, value);
    }
  }
  return weight;
}

/// Expects the product of each input alone to be its weight.
void expect_each_input(const Exec& exec, const CodedWeight& codes, const Values& weight,
                       int64_t columns, int64_t rows_at_once) {
  const Values inputs(Exec{}, DType::bf16, {columns, columns});
  std::memset(inputs.memory.data(), 0, inputs.memory.bytes());
  for (int64_t i = 0; i < columns; ++i) inputs.set(i * columns + i, 1);
  const Values x = on_device(exec, inputs, {columns, columns});
  const Values out(exec, DType::f32, {columns, kRowsOfCodes});
  for (int64_t row = 0; row < columns; row += rows_at_once) {
    codes.multiply(exec, x.view.rows(row, rows_at_once), out.view.rows(row, rows_at_once));
  }
  const Values found = on_host(exec, out, {columns, kRowsOfCodes});
  for (int64_t i = 0; i < columns; ++i) {
    for (int64_t row = 0; row < kRowsOfCodes; ++row) {
      ASSERT_EQ(found.get(i * kRowsOfCodes + row), weight.get(row * columns + i))
          << "input " << i << " of " << columns << ", row " << row << ", " << rows_at_once
          << " rows of x";
    }
  }
}

TEST_P(CodedGemm, EachCodeIsMultipliedExactly) {
  on_hopper([](const Exec& exec, Communicator&) {
    // From 4096 inputs on they are divided by the most splits; of 16384 each has more steps than
    // twice the stages.
    for (const auto& [columns, rows_at_once] : {std::pair<int64_t, int64_t>{512, 8},
                                                {512, 16},
                                                {512, 32},
                                                {512, 64},
                                                {4096, 64},
                                                {16384, 8},
                                                {16384, 16},
                                                {16384, 64}}) {
      for (const WeightFormat format : kFormats) {
        SCOPED_TRACE(name_of(format));
        const Values known = all_codes(format, columns);
        const CodedWeight codes =
            coded(exec, format, on_device(exec, known, {kRowsOfCodes, columns}).view);
        expect_each_input(exec, codes, known, columns, rows_at_once);
        const Values extreme = extreme_weights(kRowsOfCodes, columns, 1);
        const CodedWeight rounded =
            coded(exec, format, on_device(exec, extreme, {kRowsOfCodes, columns}).view);
        const Values read(exec, DType::f32, {kRowsOfCodes, columns});
        rounded.read(exec, read.view);
        expect_each_input(exec, rounded, on_host(exec, read, {kRowsOfCodes, columns}), columns,
                          rows_at_once);
      }
    }
  });
}

/// Generated products: numbers of rows and of columns in all instances of the kernels, and k with
/// all numbers of splits, one step and many, and shorter last steps; each of these kinds in both
/// formats, with outputs of both dtypes.
struct CodedCase {
  int64_t m, n, k;
  WeightFormat format;
  DType out;

  CodedCase(Draw& draw, uint64_t trial)
      : m(trial % 3 == 0 ? 1 + draw.up_to(8) : 1 + draw.up_to(kMaxFewRows)),
        n(1 + draw.up_to(700) + (trial % 8 == 7 ? 16384 : 0)),
        k(8 * (1 + draw.up_to(trial % 8 == 7   ? 300
                              : trial % 4 == 0 ? 1000
                              : trial % 4 == 1 ? 16
                                               : 160))),
        format(kFormats[trial / 8 % 2]),
        out(kDTypes[trial / 16 % 2]) {}
  std::string describe() const {
    return fmt::format("{}: {} rows, n {}, k {}, to {}", name_of(format), m, n, k, name_of(out));
  }
};

TEST_P(CodedGemm, ProductsMatchTheCpuAndLeaveTheMemoryAround) {
  on_hopper([](const Exec&, Communicator& comm) {
    for (uint64_t trial = 0; trial < 40; ++trial) {
      Draw draw{3000 + trial};
      const CodedCase c(draw, trial);
      const Alignment of_x{.gap = 8 * draw.up_to(3), .start = 8 * draw.up_to(2)};
      const Alignment of_out{.gap = draw.up_to(6), .start = draw.up_to(5)};
      const bool accumulate = draw.up_to(2) == 1;
      expect_equal(
          comm, c.describe(),
          {matrix("x", DType::bf16, c.m, c.k, of_x), matrix("weight", DType::f32, c.n, c.k),
           close(matrix("out", c.out, c.m, c.n, of_out), double(c.k) / 4)},
          [&](const Exec& exec, const TensorList& of) {
            const CodedWeight weight = coded(exec, c.format, of[1]);
            weight.multiply(exec, of[0], of[2], {.accumulate = accumulate});
            wait(exec);  // before the weight's memory is freed
          });
    }
  });
}

TEST_P(CodedGemm, AnyNumberOfFewRowsIsMultiplied) {
  on_hopper([](const Exec& exec, Communicator&) {
    for (const WeightFormat format : kFormats) {
      const int64_t n = 201, k = 520;
      const Values weight = random_values(DType::f32, n, k, 1);
      const Values x = random_values(DType::bf16, kMaxFewRows + 1, k, 2);
      const Values expected(Exec{}, DType::f32, {kMaxFewRows, n});
      coded({}, format, weight.view).multiply({}, x.view.rows(0, kMaxFewRows), expected.view);
      const Values on_weight = on_device(exec, weight, {n, k});
      const Values on_x = on_device(exec, x, {kMaxFewRows + 1, k});
      const CodedWeight codes = coded(exec, format, on_weight.view);
      for (int64_t m = 1; m <= kMaxFewRows; ++m) {
        const Values out(exec, DType::f32, {m, n});
        codes.multiply(exec, on_x.view.rows(0, m), out.view);
        const Memory found = to_host(exec, out.memory);
        for (int64_t i = 0; i < m * n; ++i) {
          ASSERT_NEAR(reinterpret_cast<const float*>(found.data())[i], expected.view.as<float>()[i],
                      1e-6 * double(k))
              << name_of(format) << " " << m << " rows, " << i;
        }
      }
      const Values out(exec, DType::f32, {kMaxFewRows + 1, n});
      EXPECT_NO_THROW(codes.multiply(exec, on_x.view.rows(0, 0), out.view.rows(0, 0)));
      EXPECT_THROW(codes.multiply(exec, on_x.view, out.view), InvalidArgument);
      EXPECT_THROW(
          codes.multiply(exec, on_x.view.rows(0, 2), out.view.rows(0, 2), {.first_row = 1}),
          InvalidArgument);
    }
  });
}

TEST_P(CodedGemm, RowsHaveTheSameBitsInAnyCompany) {
  on_hopper([](const Exec& exec, Communicator&) {
    for (uint64_t trial = 0; trial < 24; ++trial) {
      Draw draw{3100 + trial};
      const CodedCase c(draw, trial);
      const Values weight = on_device(exec, random_values(DType::f32, c.n, c.k, trial), {c.n, c.k});
      const Values x = on_device(exec, random_values(DType::bf16, kMaxFewRows, c.k, trial + 1),
                                 {kMaxFewRows, c.k});
      const CodedWeight codes = coded(exec, c.format, weight.view);
      const auto bits = [&](int64_t row, int64_t m, bool accumulate) {
        const Values out(exec, DType::f32, {m, c.n});
        for (int call = 0; call <= int(accumulate); ++call) {
          codes.multiply(exec, x.view.rows(row, m), out.view, {.accumulate = accumulate});
        }
        return to_host(exec, out.memory);
      };
      const Memory all = bits(0, kMaxFewRows, false);
      const auto* const expected = reinterpret_cast<const float*>(all.data());
      for (const int64_t m : {int64_t{1}, int64_t{2}, c.m, int64_t{8}, int64_t{17}}) {
        const int64_t row = draw.up_to(kMaxFewRows - m + 1);
        const Memory some = bits(row, m, false);
        EXPECT_EQ(std::memcmp(some.data(), expected + row * c.n, some.bytes()), 0)
            << c.describe() << ": rows from " << row << ", " << m;
      }
      const Memory doubled = bits(0, kMaxFewRows, true);
      for (int64_t i = 0; i < kMaxFewRows * c.n; ++i) {
        ASSERT_EQ(reinterpret_cast<const float*>(doubled.data())[i], 2 * expected[i])
            << c.describe();
      }
    }
  });
}

TEST_P(CodedGemm, SwigluHasTheBitsOfAProductInBf16) {
  on_hopper([](const Exec& exec, Communicator&) {
    for (uint64_t trial = 0; trial < 24; ++trial) {
      Draw draw{3200 + trial};
      CodedCase c(draw, trial);
      c.n = (c.n + 7) / 8 * 8;
      const int64_t f = c.n / 2;
      const Values weight = on_device(exec, random_values(DType::f32, c.n, c.k, trial), {c.n, c.k});
      const Values x = on_device(exec, random_values(DType::bf16, c.m, c.k, trial + 1), {c.m, c.k});
      const CodedWeight codes = coded(exec, c.format, weight.view);
      const Values hidden(exec, DType::bf16, {c.m, c.n}), inner(exec, DType::bf16, {c.m, f}),
          fused(exec, DType::bf16, {c.m, f});
      codes.multiply(exec, x.view, hidden.view);
      swiglu_forward(exec, hidden.view.narrow(1, 0, f), hidden.view.narrow(1, f, f), inner.view);
      ASSERT_TRUE(codes.multiply_swiglu(exec, x.view, fused.view)) << c.describe();
      const Memory expected = to_host(exec, inner.memory), found = to_host(exec, fused.memory);
      EXPECT_EQ(std::memcmp(found.data(), expected.data(), found.bytes()), 0) << c.describe();
      EXPECT_TRUE(codes.multiply_swiglu(exec, x.view.rows(0, 0), fused.view.rows(0, 0)));
      const Values wide(exec, DType::f32, {c.m, f});
      EXPECT_FALSE(codes.multiply_swiglu(exec, x.view, wide.view)) << "bf16 only";
    }
    for (const int64_t n : {2, 6, 132, 334}) {
      const CodedWeight codes(exec, WeightFormat::int8, n, 128);
      const Values x(exec, DType::bf16, {1, 128}), out(exec, DType::bf16, {1, n / 2});
      EXPECT_FALSE(codes.multiply_swiglu(exec, x.view, out.view)) << n << " rows";
    }
  });
}

// A chain of products, each of which reads what the one before wrote, and overwrites what that
// read.
TEST_P(CodedGemm, ProductsThatStartEarlyWaitForEachOthersRows) {
  on_hopper([](const Exec& exec, Communicator&) {
    for (const WeightFormat format : kFormats) {
      for (const auto& [m, width] : {std::pair<int64_t, int64_t>{1, 512}, {16, 2048}, {64, 4096}}) {
        const Values x = random_values(DType::bf16, m, width, 5);
        Values w = random_values(DType::f32, width, width, 6);
        for (int64_t i = 0; i < width * width; ++i) w.set(i, w.get(i) * 0.02);
        const Values on_w = on_device(exec, w, {width, width});
        const CodedWeight codes = coded(exec, format, on_w.view);
        Memory first;
        for (int call = 0; call < 6; ++call) {
          const Values a = on_device(exec, x, {m, width}), b(exec, DType::bf16, {m, width});
          for (int i = 0; i < 4; ++i) {
            codes.multiply(exec, a.view, b.view);
            if (call == 0) wait(exec);
            codes.multiply(exec, b.view, a.view);
            if (call == 0) wait(exec);
          }
          Memory found = to_host(exec, a.memory);
          if (call == 0) {
            first = std::move(found);
          } else {
            EXPECT_EQ(std::memcmp(found.data(), first.data(), found.bytes()), 0)
                << name_of(format) << " " << m << " rows of " << width << ", call " << call;
          }
        }
      }
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Gpus, CodedGemm, ::testing::Values(1), gpus_name);

}  // namespace
}  // namespace tandem::test
