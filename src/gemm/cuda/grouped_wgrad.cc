#include "gemm/cuda/grouped_wgrad.h"

#include <fmt/format.h>

#include "tandem/error.h"

namespace tandem::gpu {

std::unique_ptr<GroupedWgrad> make_grouped_wgrad_bf16(const WgradShape& shape);
std::unique_ptr<GroupedWgrad> make_grouped_wgrad_f16(const WgradShape& shape);

std::unique_ptr<GroupedWgrad> make_grouped_wgrad(const WgradShape& shape) {
  const auto require = [](bool holds, const char* what, int64_t value, const char* expected) {
    if (!holds) {
      throw InvalidArgument(
          fmt::format("gradients of grouped weights: {} = {}: expected {}", what, value, expected));
    }
  };
  require(shape.groups > 0, "groups", shape.groups, "at least 1");
  require(shape.rows > 0 && shape.rows % 8 == 0, "rows", shape.rows, "a multiple of 8");
  require(shape.columns > 0 && shape.columns % 8 == 0, "columns", shape.columns, "a multiple of 8");
  if (shape.dtype == DType::bf16) return make_grouped_wgrad_bf16(shape);
  if (shape.dtype == DType::f16) return make_grouped_wgrad_f16(shape);
  throw InvalidArgument(fmt::format("gradients of grouped weights: dtype {}: expected bf16 or f16",
                                    name_of(shape.dtype)));
}

}  // namespace tandem::gpu
