#include "gemm/cuda/grouped.h"

#include <fmt/format.h>

#include <limits>

#include "tandem/error.h"

namespace tandem::gpu {

std::unique_ptr<GroupedGemm> make_grouped_bf16(const GroupedShape& shape);
std::unique_ptr<GroupedGemm> make_grouped_f16(const GroupedShape& shape);
std::unique_ptr<GroupedGemm> make_grouped_fp8(const GroupedShape& shape);
std::unique_ptr<GroupedGemm> make_grouped_paired_bf16(const GroupedShape& shape);
std::unique_ptr<GroupedGemm> make_grouped_paired_f16(const GroupedShape& shape);
std::unique_ptr<GroupedGemm> make_grouped_paired_fp8(const GroupedShape& shape);

std::unique_ptr<GroupedGemm> make_grouped_gemm(const GroupedShape& shape) {
  const auto require = [](bool holds, const char* what, int64_t value, const char* expected) {
    if (!holds) {
      throw InvalidArgument(
          fmt::format("grouped GEMM: {} = {}: expected {}", what, value, expected));
    }
  };
  constexpr int64_t kMax = std::numeric_limits<int32_t>::max();
  constexpr int kMaxGroups = std::numeric_limits<int16_t>::max();
  constexpr int64_t kMaxColumns = kMaxGroups * kGroupedColumns / 4;  // tiles of 64 stored
  require(shape.groups > 0 && shape.groups <= kMaxGroups, "groups", shape.groups, "1 to 32767");
  require(shape.rows >= 0 && shape.padded_rows() <= kMax, "rows", shape.rows,
          "at least 0, with whole tiles below 2^31");
  const bool codes = shape.dtype == DType::e4m3;
  const int unit = codes ? 16 : 8;
  const char* const multiple = codes ? "a multiple of 16" : "a multiple of 8";
  require(shape.columns > 0 && shape.columns % unit == 0, "columns", shape.columns, multiple);
  require(shape.columns <= kMaxColumns, "columns", shape.columns, "at most 2097088");
  require(shape.k > 0 && shape.k % unit == 0, "k", shape.k, multiple);
  require(shape.weight_rows() <= kMax, "rows of all weights", shape.weight_rows(), "below 2^31");
  require(!shape.paired || !shape.gathered, "paired", 1, "sorted rows");
  require(!shape.transposed || !(shape.gathered || shape.gated), "transposed", 1,
          "neither gathered nor gated");
  require(!shape.transposed || !codes, "transposed", 1, "no e4m3");
  if (shape.dtype == DType::bf16) {
    return shape.paired ? make_grouped_paired_bf16(shape) : make_grouped_bf16(shape);
  }
  if (shape.dtype == DType::f16) {
    return shape.paired ? make_grouped_paired_f16(shape) : make_grouped_f16(shape);
  }
  if (codes) return shape.paired ? make_grouped_paired_fp8(shape) : make_grouped_fp8(shape);
  throw InvalidArgument(
      fmt::format("grouped GEMM: dtype {}: expected bf16, f16 or e4m3", name_of(shape.dtype)));
}

}  // namespace tandem::gpu
