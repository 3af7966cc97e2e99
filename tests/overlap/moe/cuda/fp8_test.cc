// Grouped GEMMs of scaled e4m3 codes against f64 sums within their accumulation error.
#include <fmt/format.h>

#include <cmath>
#include <limits>
#include <span>
#include <string>
#include <vector>

#include "bench/error_bound.h"
#include "tandem/error.h"
#include "tests/error_of.h"
#include "tests/overlap/moe/cuda/values.h"

namespace tandem::test {
namespace {

using namespace gpu;

/// Matrix of codes with one scale per row.
struct Coded {
  int64_t columns = 1;
  std::vector<Float8E4M3> codes;
  std::vector<float> scales;

  int64_t rows() const { return int64_t(scales.size()); }
  float code(int64_t row, int64_t column) const {
    return codes[size_t(row * columns + column)].to_float();
  }
  std::vector<float> values() const {
    std::vector<float> all(codes.size());
    for (size_t i = 0; i < all.size(); ++i) {
      all[i] = codes[i].to_float() * scales[i / size_t(columns)];
    }
    return all;
  }
};

/// `values` as codes, with unrelated scales.
Coded coded(const std::vector<float>& values, int64_t columns, std::vector<float> scales) {
  Coded all{columns, {}, std::move(scales)};
  for (const float value : values) all.codes.push_back(Float8E4M3::from_float(value));
  return all;
}

std::vector<float> scales_of(int64_t count, uint64_t stream, float size) {
  std::vector<float> all(static_cast<size_t>(count));
  for (size_t i = 0; i < all.size(); ++i) all[i] = (0.25f + uniform(5, stream, i)) * size;
  return all;
}

/// Powers of two from 1/8 to 8.
std::vector<float> whole_scales(int64_t count, uint64_t stream) {
  std::vector<float> all(static_cast<size_t>(count));
  for (size_t i = 0; i < all.size(); ++i) {
    all[i] = std::ldexp(1.f, int(philox(9, stream, i)[0] % 7) - 3);
  }
  return all;
}

struct Case {
  std::vector<int64_t> counts;  ///< rows of each group
  int64_t columns, k;
  bool gathered, gated, paired;

  GroupedShape shape() const {
    int64_t rows = 0;
    for (const int64_t count : counts) rows += count;
    return {.dtype = DType::e4m3,
            .groups = int(counts.size()),
            .rows = rows,
            .columns = columns,
            .k = k,
            .gathered = gathered,
            .gated = gated,
            .paired = paired};
  }
  std::string name() const {
    return fmt::format("{} rows of {} groups, {} x {} {}{}{}", shape().rows, counts.size(), columns,
                       k, gathered ? "gathered" : "sorted", gated ? ", gated" : "",
                       paired ? ", in pairs" : "");
  }
};

std::vector<Case> cases(const std::vector<std::vector<int64_t>>& spreads,
                        const std::vector<std::pair<int64_t, int64_t>>& sizes,
                        const std::vector<bool>& gated_forms) {
  std::vector<Case> all;
  for (const auto& counts : spreads) {
    for (const auto& [columns, k] : sizes) {
      for (const bool gathered : {true, false}) {
        for (const bool gated : gated_forms) {
          const bool paired = !gathered && all.size() % 3 == 1;
          all.push_back({counts, columns, k, gathered, gated, paired});
        }
      }
    }
  }
  return all;
}

/// Sum of scaled codes, and the error bound of the GEMM.
struct Sum {
  double value = 0, squares = 0;
  void add(double term) {
    value += term;
    squares += term * term;
  }
  void scale(double by) {
    value *= by;
    squares *= by * by;
  }
  double error(int64_t k) const {
    const AccumulationError lost = accumulation_error(DType::e4m3, DType::bf16, k);
    return lost.of_root * std::sqrt(squares) + (lost.of_sum + 0x1p-22) * std::abs(value);
  }
};

struct Bounded {
  double value, error;
};
Bounded rounded(double value, double error) {
  return {value, error + half_ulp(std::abs(value) + error, DType::bf16)};
}
/// silu(gate) x up; silu's slope is at most 1.1.
Bounded gated(const Sum& gate, const Sum& up, int64_t k) {
  const double silu = gate.value / (1 + std::exp(-gate.value)), value = silu * up.value;
  const double of_silu = 1.1 * gate.error(k) + 1e-5 * std::abs(silu), of_up = up.error(k);
  return rounded(value, of_silu * std::abs(up.value) + of_up * std::abs(silu) + of_silu * of_up);
}

class GpuMoeFp8 : public GpuMoe {
 protected:
  /// Result [rows, columns] of the GEMM, in the order of x's rows.
  std::vector<float> multiply(const Case& c, const Coded& x, const Coded& weight,
                              PermutedRows& permuted) const {
    const GroupedShape shape = c.shape();
    const auto gemm = make_grouped_gemm(shape);
    permuted = permute(c.counts, shape, *gemm);
    const auto padded = size_t(shape.padded_rows()), k = size_t(c.k);
    Coded laid = x;
    if (!c.gathered) {
      // Padding rows of a tile must not matter.
      laid.codes.assign(padded * k, Float8E4M3{0x7f});
      laid.scales.assign(padded, std::numeric_limits<float>::quiet_NaN());
      for (size_t r = 0; r < permuted.rows(); ++r) {
        const auto to = size_t(permuted.at[r]);
        std::copy_n(&x.codes[r * k], k, &laid.codes[to * k]);
        laid.scales[to] = x.scales[r];
      }
    }
    const DeviceMemory on_x = to_device(laid.codes), x_scales = to_device(laid.scales),
                       w = to_device(weight.codes), w_scales = to_device(weight.scales),
                       out(padded * size_t(c.columns) * 2);
    check(cudaMemsetAsync(out.data(), 0xff, out.bytes(), stream()), "poison");
    const auto pointer = [](const DeviceMemory& memory) {
      return reinterpret_cast<const float*>(memory.data());
    };
    gemm->launch({.x = on_x.data(),
                  .source = permuted.source_data(),
                  .weight = w.data(),
                  .out = out.data(),
                  .scales = {pointer(x_scales), pointer(w_scales)}},
                 stream());
    const auto all = loaded(DType::bf16, to_host<uint16_t>(out, padded * size_t(c.columns)));
    std::vector<float> found;
    for (const int32_t at : permuted.at) {
      const auto first = all.begin() + std::ptrdiff_t(at) * c.columns;
      found.insert(found.end(), first, first + c.columns);
    }
    return found;
  }

  void expect_within_bounds(const Case& c, const Coded& x, const Coded& weight) const {
    PermutedRows permuted;
    const auto found = multiply(c, x, weight, permuted);
    const int64_t group_rows = c.columns * (c.gated ? 2 : 1);
    for (int64_t r = 0; r < x.rows(); ++r) {
      const auto sum_of = [&](int64_t column) {
        const int64_t of_weight = permuted.group[size_t(r)] * group_rows + column;
        Sum sum;
        for (int64_t i = 0; i < c.k; ++i) {
          sum.add(double(x.code(r, i)) * double(weight.code(of_weight, i)));
        }
        sum.scale(double(x.scales[size_t(r)]) * double(weight.scales[size_t(of_weight)]));
        return sum;
      };
      for (int64_t n = 0; n < c.columns; ++n) {
        const Sum sum = sum_of(n);
        const Bounded expected =
            c.gated ? gated(sum, sum_of(c.columns + n), c.k) : rounded(sum.value, sum.error(c.k));
        const double value = double(found[size_t(r * c.columns + n)]);
        ASSERT_LE(std::abs(value - expected.value), expected.error)
            << c.name() << ": row " << r << " column " << n << ": " << value << ", exactly "
            << expected.value;
      }
    }
  }
};

TEST_F(GpuMoeFp8, GroupedGemmsOfWholeNumbersAreExact) {
  for (const Case& c :
       cases({{1}, {128}, {129}, {0, 0, 7}, {300, 0, 1, 128, 5}, std::vector<int64_t>(40, 33)},
             {{16, 16}, {128, 128}, {272, 144}, {1008, 208}, {144, 528}}, {false})) {
    const GroupedShape shape = c.shape();
    // Sums of this few whole numbers need 8 bits, as in the bf16 tests (moe_test.cc).
    auto numbers = whole_numbers(shape.rows * c.k, 1, 1);
    for (size_t i = 0; i < numbers.size(); ++i) {
      if (philox(8, 1, i)[0] % 2) numbers[i] = 0;
    }
    const Coded x = coded(numbers, c.k, whole_scales(shape.rows, 1)),
                w = coded(whole_numbers(shape.weight_rows() * c.k, 2, 1), c.k,
                          whole_scales(shape.weight_rows(), 2));
    PermutedRows permuted;
    const auto found = multiply(c, x, w, permuted);
    const auto values = w.values();
    for (int64_t r = 0; r < shape.rows; ++r) {
      for (int64_t n = 0; n < c.columns; ++n) {
        const int64_t row = permuted.group[size_t(r)] * c.columns + n;
        float sum = 0;
        for (int64_t i = 0; i < c.k; ++i) {
          sum += numbers[size_t(r * c.k + i)] * values[size_t(row * c.k + i)];
        }
        ASSERT_LE(std::abs(sum), 256 * w.scales[size_t(row)]) << c.name();
        ASSERT_EQ(found[size_t(r * c.columns + n)], sum * x.scales[size_t(r)])
            << c.name() << ": row " << r << " column " << n;
      }
    }
  }
}

TEST_F(GpuMoeFp8, GroupedGemmsAreWithinTheirErrorBounds) {
  for (const Case& c : cases({{1}, {0, 0, 7}, {130, 0, 1, 5}, std::vector<int64_t>(40, 9)},
                             {{16, 16}, {64, 128}, {80, 272}, {208, 1040}}, {false, true})) {
    const GroupedShape shape = c.shape();
    expect_within_bounds(
        c, coded(random_values(shape.rows * c.k, 21, 1), c.k, scales_of(shape.rows, 22, 1)),
        coded(random_values(shape.weight_rows() * c.k, 23, 1), c.k,
              scales_of(shape.weight_rows(), 24, 0.1f)));
    if (HasFatalFailure()) return;
  }
}

// Truncation in narrow accumulators adds up if all terms are positive: the bound allows for a
// limited span of K between promotions (tests/bench/error_bound_test.cc).
TEST_F(GpuMoeFp8, LongSumsArePromotedInTime) {
  for (const Case& c : cases({{3, 0, 140}}, {{48, 4096}, {144, 7168}}, {false})) {
    const GroupedShape shape = c.shape();
    auto x = random_values(shape.rows * c.k, 31, 1),
         w = random_values(shape.weight_rows() * c.k, 32, 1);
    for (auto* const values : {&x, &w}) {
      for (float& value : *values) value = std::abs(value);
    }
    expect_within_bounds(c, coded(x, c.k, scales_of(shape.rows, 33, 1)),
                         coded(w, c.k, scales_of(shape.weight_rows(), 34, 1)));
    if (HasFatalFailure()) return;
  }
}

TEST_F(GpuMoeFp8, UnsupportedArgumentsAreRejectedByName) {
  const auto refused = [](const GroupedShape& shape) {
    return error_of<InvalidArgument>([&] { make_grouped_gemm(shape); });
  };
  const auto expect_named = [](const std::string& message, const char* name) {
    EXPECT_NE(message.find(name), std::string::npos) << message;
  };
  const DType e4m3 = DType::e4m3;
  expect_named(refused({.dtype = e4m3, .rows = 1, .columns = 16, .k = 24}), "k = 24");
  expect_named(refused({.dtype = e4m3, .rows = 1, .columns = 24, .k = 16}), "columns = 24");
  expect_named(refused({.dtype = e4m3, .rows = 1, .columns = 16, .k = 16, .transposed = true}),
               "transposed");
  const auto gemm =
      make_grouped_gemm({.dtype = e4m3, .rows = 1, .columns = 16, .k = 16, .gathered = true});
  expect_named(error_of<InvalidArgument>([&] { gemm->launch({}, stream()); }), "scales");
  const float scale = 1;
  expect_named(error_of<InvalidArgument>([&] {
                 gemm->launch({.local = &scale, .scales = {&scale, &scale}}, stream());
               }),
               "e4m3 rows");
}

}  // namespace
}  // namespace tandem::test
