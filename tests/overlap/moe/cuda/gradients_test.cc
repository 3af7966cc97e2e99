// Grouped weight gradients are exact for numbers that allow it.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "gemm/cuda/grouped_wgrad.h"
#include "tandem/error.h"
#include "tests/overlap/moe/cuda/values.h"

namespace tandem::test {
namespace {

using namespace gpu;

/// Uses of the sums.
enum class Writing { add, store_f32, store_operand };
constexpr Writing kWritings[] = {Writing::add, Writing::store_f32, Writing::store_operand};
constexpr const char* kNames[] = {"added", "stored in f32", "stored in the operands' dtype"};

class GroupedGradients : public GpuMoe {
 protected:
  struct Case {
    DType dtype;
    std::vector<int> counts;  ///< rows of each group
    int64_t rows, columns;
    std::string describe() const {
      return fmt::format("{} {} groups, first {}, {} x {}", name_of(dtype), counts.size(),
                         counts[0], rows, columns);
    }
    size_t gradient() const { return size_t(rows * columns); }
    size_t gradients() const { return counts.size() * gradient(); }
  };
  struct Operands {
    std::vector<schedule::GroupRows> group_rows;
    std::vector<float> dy, x;
    int padded_rows = 0;
  };

  static Operands operands_of(const Case& c) {
    Operands all;
    int padded = 0;
    for (const int count : c.counts) {
      all.group_rows.push_back({padded, count});
      padded += schedule::group_tiles(count, kGroupedRows) * kGroupedRows;
    }
    all.group_rows.push_back({padded, 0});
    all.padded_rows = padded + 128;  // more than any group uses
    all.dy = whole_numbers(all.padded_rows * c.rows, 1, 2);
    all.x = whole_numbers(all.padded_rows * c.columns, 2, 2);
    for (size_t g = 0; g < c.counts.size(); ++g) {
      const auto blank = [&](std::vector<float>& of, int64_t width) {
        std::fill(of.begin() + (all.group_rows[g].first + c.counts[g]) * width,
                  of.begin() + all.group_rows[g + 1].first * width, 0.0f);
      };
      blank(all.dy, c.rows);
      blank(all.x, c.columns);
    }
    return all;
  }

  static std::vector<float> sums_of(const Case& c, const Operands& o) {
    std::vector<float> sums(c.gradients(), 0.0f);
    for (size_t g = 0; g < c.counts.size(); ++g) {
      float* const to = sums.data() + g * c.gradient();
      for (int64_t r = o.group_rows[g].first; r < o.group_rows[g].first + c.counts[g]; ++r) {
        for (int64_t m = 0; m < c.rows; ++m) {
          const float by = o.dy[size_t(r * c.rows + m)];
          for (int64_t n = 0; n < c.columns; ++n) {
            to[m * c.columns + n] += by * o.x[size_t(r * c.columns + n)];
          }
        }
      }
    }
    return sums;
  }

  /// Gradients that are stored overwrite NaNs, and zeros are stored where a group has no rows.
  void expect_exact(const Case& c) const {
    const Operands o = operands_of(c);
    const DeviceMemory dy = to_device(stored(c.dtype, o.dy)), x = to_device(stored(c.dtype, o.x)),
                       groups = to_device(o.group_rows);
    const auto wgrad = make_grouped_wgrad({.dtype = c.dtype,
                                           .groups = int(c.counts.size()),
                                           .padded_rows = o.padded_rows,
                                           .rows = c.rows,
                                           .columns = c.columns});
    const std::vector<float> sums = sums_of(c, o);
    for (const Writing writing : kWritings) {
      const bool rounds = writing == Writing::store_operand, adds = writing == Writing::add;
      const auto there = adds ? whole_numbers(int64_t(c.gradients()), 3, 100)
                              : std::vector<float>(c.gradients(), std::nanf(""));
      const DeviceMemory out = rounds ? to_device(stored(c.dtype, there)) : to_device(there);
      wgrad->launch({.dy = dy.data(),
                     .x = x.data(),
                     .group_rows = reinterpret_cast<schedule::GroupRows*>(groups.data()),
                     .dweight = out.data(),
                     .dtype = rounds ? c.dtype : DType::f32,
                     .stores = !adds},
                    stream());
      const auto found = rounds ? loaded(c.dtype, to_host<uint16_t>(out, sums.size()))
                                : to_host<float>(out, sums.size());
      for (size_t i = 0; i < sums.size(); ++i) {
        float expected = adds ? there[i] + sums[i] : sums[i];
        if (rounds) expected = loaded(c.dtype, stored(c.dtype, expected));
        ASSERT_EQ(found[i], expected)
            << c.describe() << ", " << kNames[size_t(writing)] << ": group " << i / c.gradient()
            << " row " << i % c.gradient() / size_t(c.columns) << " column "
            << i % size_t(c.columns);
      }
    }
  }
};

TEST_F(GroupedGradients, OfWholeNumbersAreExact) {
  const std::vector<std::vector<int>> spreads{
      {1}, {64}, {65}, {128}, {129}, {0, 0, 7}, {300, 0, 1, 128, 5}, std::vector<int>(40, 33)};
  for (const DType dtype : {DType::bf16, DType::f16}) {
    for (const auto& counts : spreads) {
      for (const auto& [rows, columns] :
           {std::pair<int64_t, int64_t>{8, 8}, {128, 256}, {136, 264}, {1032, 40}, {72, 1000}}) {
        ASSERT_NO_FATAL_FAILURE(expect_exact({dtype, counts, rows, columns}));
      }
    }
  }
}

TEST_F(GroupedGradients, WithoutRowsAreStoredAsZeros) {
  const WgradShape shape{.groups = 3, .padded_rows = 0, .rows = 72, .columns = 40};
  const auto wgrad = make_grouped_wgrad(shape);
  const size_t count = size_t(shape.groups * shape.rows * shape.columns);
  const std::vector<float> ones(count, 1.0f);
  for (const bool stores : {false, true}) {
    const DeviceMemory out = to_device(ones);
    wgrad->launch({.dweight = out.data(), .stores = stores}, stream());
    EXPECT_EQ(to_host<float>(out, count), std::vector<float>(count, stores ? 0.0f : 1.0f));
  }
}

TEST_F(GpuMoe, UnsupportedGradientsAreRejectedByName) {
  const auto refused = [](const WgradShape& shape) {
    try {
      make_grouped_wgrad(shape);
    } catch (const InvalidArgument& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  EXPECT_NE(refused({.rows = 12, .columns = 8}).find("rows = 12"), std::string::npos);
  EXPECT_NE(refused({.rows = 8, .columns = 4}).find("columns = 4"), std::string::npos);
  EXPECT_NE(refused({.dtype = DType::f32, .rows = 8, .columns = 8}).find("f32"), std::string::npos);
}

}  // namespace
}  // namespace tandem::test
