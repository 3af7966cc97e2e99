// Grouped GEMMs are exact for numbers that allow it.
#include <fmt/format.h>

#include <cmath>
#include <string>

#include "tandem/error.h"
#include "tests/overlap/moe/cuda/values.h"

namespace tandem::test {
namespace {

using namespace gpu;

struct Product {
  DType dtype;
  std::vector<int64_t> counts;  ///< rows of each group
  int64_t columns, k;
  bool gathered, transposed, paired;
  std::string name() const {
    return fmt::format("{} {} groups {} x {} {}{}{}", name_of(dtype), counts.size(), columns, k,
                       gathered ? "gathered" : "sorted", transposed ? ", weight transposed" : "",
                       paired ? ", in pairs" : "");
  }
  /// Index into the weight: groups x [columns, k], or groups x [k, columns] if transposed.
  size_t weight_at(int64_t group, int64_t column, int64_t at_k) const {
    return size_t(transposed ? (group * k + at_k) * columns + column
                             : (group * columns + column) * k + at_k);
  }
};

TEST_F(GpuMoe, GroupedGemmsOfWholeNumbersAreExact) {
  std::vector<Product> products;
  const std::vector<std::vector<int64_t>> spreads{
      {1}, {128}, {129}, {0, 0, 7}, {300, 0, 1, 128, 5}, std::vector<int64_t>(40, 33), {2500, 3}};
  for (const DType dtype : {DType::bf16, DType::f16}) {
    for (const auto& counts : spreads) {
      for (const auto& [columns, k] :
           {std::pair{8, 8}, {256, 64}, {264, 72}, {1000, 200}, {136, 520}}) {
        products.push_back({dtype, counts, columns, k, true, false, false});
        for (const bool paired : {false, true}) {
          for (const bool transposed : {false, true}) {
            products.push_back({dtype, counts, columns, k, false, transposed, paired});
          }
        }
      }
    }
  }
  for (const Product& p : products) {
    const int groups = int(p.counts.size());
    int64_t rows = 0;
    for (const int64_t count : p.counts) rows += count;
    const GroupedShape shape{.dtype = p.dtype,
                             .groups = groups,
                             .rows = rows,
                             .columns = p.columns,
                             .k = p.k,
                             .gathered = p.gathered,
                             .transposed = p.transposed,
                             .paired = p.paired};
    const auto gemm = make_grouped_gemm(shape);
    const PermutedRows permuted = permute(p.counts, shape, *gemm);
    // Sums of at most 520 terms below 0.49 stay whole numbers up to 256, exact in bf16.
    const auto x = whole_numbers(rows * p.k, 1, 1),
               w = whole_numbers(groups * p.columns * p.k, 2, 1);
    std::vector<float> saved_x = x;
    for (size_t i = 0; i < saved_x.size(); ++i) {
      if (philox(8, 1, i)[0] % 2) saved_x[i] = 0;
    }
    const size_t padded = size_t(shape.padded_rows());
    const DeviceMemory weight = to_device(stored(p.dtype, w)), out(padded * size_t(p.columns) * 2);
    std::vector<float> laid = saved_x;
    if (!p.gathered) {
      laid.assign(padded * size_t(p.k), 3);  // padding rows of a tile must not matter
      for (size_t r = 0; r < permuted.rows(); ++r) {
        std::copy_n(&saved_x[r * size_t(p.k)], p.k, &laid[size_t(permuted.at[r]) * size_t(p.k)]);
      }
    }
    const DeviceMemory on_x = to_device(stored(p.dtype, laid));
    gemm->launch({on_x.data(), permuted.source_data(), weight.data(), out.data()}, stream());
    const auto found = loaded(p.dtype, to_host<uint16_t>(out, padded * size_t(p.columns)));
    for (size_t r = 0; r < permuted.rows(); ++r) {
      const float* row = &saved_x[r * size_t(p.k)];
      for (int64_t n = 0; n < p.columns; ++n) {
        float sum = 0;
        for (int64_t k = 0; k < p.k; ++k) sum += row[k] * w[p.weight_at(permuted.group[r], n, k)];
        ASSERT_LE(std::abs(sum), 256) << p.name();
        ASSERT_EQ(found[size_t(permuted.at[r]) * size_t(p.columns) + size_t(n)], sum)
            << p.name() << ": row " << r << " column " << n;
      }
    }
  }
}

TEST_F(GpuMoe, UnsupportedShapesAreRejectedByName) {
  const auto refused = [](GroupedShape shape) {
    try {
      make_grouped_gemm(shape);
    } catch (const InvalidArgument& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  EXPECT_NE(refused({.groups = 0, .rows = 1, .columns = 8, .k = 8}).find("groups = 0"),
            std::string::npos);
  EXPECT_NE(refused({.groups = 2, .rows = 1, .columns = 12, .k = 8}).find("columns = 12"),
            std::string::npos);
  EXPECT_NE(refused({.groups = 2, .rows = 1, .columns = 8, .k = 4}).find("k = 4"),
            std::string::npos);
  EXPECT_NE(refused({.rows = 1, .columns = 8, .k = 8, .gathered = true, .paired = true})
                .find("paired = 1: expected sorted rows"),
            std::string::npos);
  EXPECT_NE(refused({.rows = 1, .columns = 8, .k = 8, .gated = true, .transposed = true})
                .find("transposed"),
            std::string::npos);
  EXPECT_NE(refused({.dtype = DType::f32, .rows = 1, .columns = 8, .k = 8}).find("f32"),
            std::string::npos);
}

TEST_F(GpuMoe, OverlappedSortIsRejectedIfUnsupported) {
  const auto refused = [](const auto& make) {
    try {
      make();
    } catch (const InvalidArgument& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  const auto gathering = make_grouped_gemm({.rows = 1, .columns = 8, .k = 8, .gathered = true});
  const uint32_t ready = 0;
  EXPECT_NE(refused([&] { gathering->launch({.ready = &ready}, stream()); }).find("sorted rows"),
            std::string::npos);
  EXPECT_NE(refused([&] { gathering->launch({.concurrent = true}, stream()); }).find("sorted rows"),
            std::string::npos);
}

}  // namespace
}  // namespace tandem::test
