#include "overlap/check.h"

#include <fmt/format.h>

#include <utility>

namespace tandem {
namespace {

[[noreturn]] void reject(std::string_view op, std::string_view operand, const Tensor& tensor,
                         const std::string& expected) {
  throw InvalidArgument(
      fmt::format("{}: {} is {}: expected {}", op, operand, tensor.describe(), expected));
}

void check_extent(std::string_view op, std::string_view operand, const Tensor& t, int64_t rows,
                  int64_t columns, DType dtype, DType other) {
  const bool shape = t.dims() == 2 && t.dim(0) == rows && t.dim(1) == columns;
  if (!shape || (t.dtype() != dtype && t.dtype() != other)) {
    const auto also = dtype == other ? "" : fmt::format(" or {}", name_of(other));
    reject(op, operand, t, fmt::format("{}[{}, {}]{}", name_of(dtype), rows, columns, also));
  }
  if (t.device().kind != DeviceKind::cpu) reject(op, operand, t, "a CPU tensor");
  if (!t.data() && t.elements()) reject(op, operand, t, "memory behind it");
}

}  // namespace

void check_shape(std::string_view op, int64_t m, int64_t n, int64_t k, DType dtype) {
  if (m < 0 || n < 0 || k < 0) {
    throw InvalidArgument(
        fmt::format("{}: shape m {}, n {}, k {}: expected none below 0", op, m, n, k));
  }
  constexpr int64_t kMost = int64_t(1) << 48;  // bytes and ranks still fit beside it
  int64_t elements = 0;
  for (const auto& [rows, columns] : {std::pair(m, k), std::pair(n, k), std::pair(m, n)}) {
    if (__builtin_mul_overflow(rows, columns, &elements) || elements > kMost) {
      throw InvalidArgument(fmt::format("{}: shape m {}, n {}, k {}: expected at most {} elements",
                                        op, m, n, k, kMost));
    }
  }
  if (dtype != DType::f32 && dtype != DType::bf16) {
    throw InvalidArgument(fmt::format("{}: dtype {}: expected f32 or bf16{}", op, name_of(dtype),
                                      dtype == DType::e4m3 ? " on CPU ranks" : ""));
  }
}

void check_rows(std::string_view op, std::string_view operand, const Tensor& tensor, int64_t rows,
                int64_t columns, DType dtype, DType other) {
  check_extent(op, operand, tensor, rows, columns, dtype, other);
  if (tensor.elements() &&
      ((columns > 1 && tensor.stride(1) != 1) || (rows > 1 && tensor.stride(0) < columns))) {
    reject(op, operand, tensor, "dense rows (stride 1 in the last dimension)");
  }
}

void check_matrix(std::string_view op, std::string_view operand, const Tensor& tensor, int64_t rows,
                  int64_t columns, DType dtype) {
  check_extent(op, operand, tensor, rows, columns, dtype, dtype);
  if (tensor.elements() && tensor.dim(0) > 1 && tensor.dim(1) > 1 && tensor.stride(0) != 1 &&
      tensor.stride(1) != 1) {
    reject(op, operand, tensor, "one stride of 1");
  }
}

void check_bias(std::string_view op, const Tensor* bias, int64_t columns, DType dtype) {
  if (!bias) return;
  if (bias->dims() != 1 || bias->dim(0) != columns || bias->dtype() != dtype ||
      !bias->contiguous() || bias->device().kind != DeviceKind::cpu) {
    reject(op, "bias", *bias, fmt::format("{}[{}], contiguous", name_of(dtype), columns));
  }
}

}  // namespace tandem
