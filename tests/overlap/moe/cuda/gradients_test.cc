// Grouped weight gradients are exact for numbers that allow it.
#include <fmt/format.h>

#include <string>

#include "gemm/cuda/grouped_wgrad.h"
#include "tandem/error.h"
#include "tests/overlap/moe/cuda/values.h"

namespace tandem::test {
namespace {

using namespace gpu;

TEST_F(GpuMoe, GroupedWeightGradientsOfWholeNumbersAreExact) {
  const std::vector<std::vector<int>> spreads{
      {1}, {64}, {65}, {128}, {129}, {0, 0, 7}, {300, 0, 1, 128, 5}, std::vector<int>(40, 33)};
  for (const DType dtype : {DType::bf16, DType::f16}) {
    for (const auto& counts : spreads) {
      for (const auto& [rows, columns] :
           {std::pair<int64_t, int64_t>{8, 8}, {128, 256}, {136, 264}, {1032, 40}, {72, 1000}}) {
        const std::string what = fmt::format("{} {} groups, first {}, {} x {}", name_of(dtype),
                                             counts.size(), counts[0], rows, columns);
        std::vector<schedule::GroupRows> group_rows;
        int padded = 0;
        for (const int count : counts) {
          group_rows.push_back({padded, count});
          padded += schedule::group_tiles(count, kGroupedRows) * kGroupedRows;
        }
        group_rows.push_back({padded, 0});
        const int more = 128;  // unused by any group
        auto dy = whole_numbers((padded + more) * rows, 1, 2),
             x = whole_numbers((padded + more) * columns, 2, 2);
        for (size_t g = 0; g < counts.size(); ++g) {
          const auto blank = [&](std::vector<float>& of, int64_t width) {
            std::fill(of.begin() + (group_rows[g].first + counts[g]) * width,
                      of.begin() + group_rows[g + 1].first * width, 0.0f);
          };
          blank(dy, rows);
          blank(x, columns);
        }
        const auto there = whole_numbers(int64_t(counts.size()) * rows * columns, 3, 100);
        const DeviceMemory on_dy = to_device(stored(dtype, dy)), on_x = to_device(stored(dtype, x)),
                           on_groups = to_device(group_rows), out = to_device(there);
        const auto wgrad = make_grouped_wgrad({.dtype = dtype,
                                               .groups = int(counts.size()),
                                               .padded_rows = padded + more,
                                               .rows = rows,
                                               .columns = columns});
        wgrad->launch({.dy = on_dy.data(),
                       .x = on_x.data(),
                       .group_rows = reinterpret_cast<schedule::GroupRows*>(on_groups.data()),
                       .dweight = reinterpret_cast<float*>(out.data())},
                      stream());
        const auto found = to_host<float>(out, there.size());
        for (size_t g = 0; g < counts.size(); ++g) {
          std::vector<float> expected(there.begin() + int64_t(g) * rows * columns,
                                      there.begin() + int64_t(g + 1) * rows * columns);
          for (int64_t r = group_rows[g].first; r < group_rows[g].first + counts[g]; ++r) {
            for (int64_t m = 0; m < rows; ++m) {
              const float by = dy[size_t(r * rows + m)];
              for (int64_t n = 0; n < columns; ++n) {
                expected[size_t(m * columns + n)] += by * x[size_t(r * columns + n)];
              }
            }
          }
          for (size_t i = 0; i < expected.size(); ++i) {
            ASSERT_EQ(found[g * expected.size() + i], expected[i])
                << what << ": group " << g << " row " << i / size_t(columns) << " column "
                << i % size_t(columns);
          }
        }
      }
    }
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
