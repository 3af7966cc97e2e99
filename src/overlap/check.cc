#include "overlap/check.h"

#include <fmt/format.h>

#include <cmath>
#include <functional>
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

// Whether the spans from first to last element meet.
bool overlap(const Tensor& a, const Tensor& b) {
  if (a.elements() == 0 || b.elements() == 0) return false;
  const auto end = [](const Tensor& t) {
    int64_t last = 0;
    for (int i = 0; i < t.dims(); ++i) last += (t.dim(i) - 1) * t.stride(i);
    return t.as<std::byte>() + size_t(last + 1) * size_of(t.dtype());
  };
  return std::less<>()(a.as<std::byte>(), end(b)) && std::less<>()(b.as<std::byte>(), end(a));
}

}  // namespace

void check_extents(std::string_view op, int64_t m, int64_t n, int64_t k) {
  if (m < 0 || n < 0 || k < 0) {
    throw InvalidArgument(
        fmt::format("{}: shape m {}, n {}, k {}: expected none below 0", op, m, n, k));
  }
  constexpr int64_t kMost = int64_t(1) << 48;
  int64_t elements = 0;
  for (const auto& [rows, columns] : {std::pair(m, k), std::pair(n, k), std::pair(m, n)}) {
    if (__builtin_mul_overflow(rows, columns, &elements) || elements > kMost) {
      throw InvalidArgument(fmt::format("{}: shape m {}, n {}, k {}: expected at most {} elements",
                                        op, m, n, k, kMost));
    }
  }
}

void check_shape(std::string_view op, int64_t m, int64_t n, int64_t k, DType dtype) {
  check_extents(op, m, n, k);
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

void check_vector(std::string_view op, std::string_view operand, const Tensor& tensor,
                  int64_t columns, DType dtype) {
  if (tensor.dims() != 1 || tensor.dim(0) != columns || tensor.dtype() != dtype ||
      !tensor.contiguous() || tensor.device().kind != DeviceKind::cpu) {
    reject(op, operand, tensor, fmt::format("{}[{}], contiguous", name_of(dtype), columns));
  }
}

void check_add_norm(std::string_view op, bool expected, const AddNorm* given, const Tensor& out) {
  if (expected != (given != nullptr)) {
    throw InvalidArgument(fmt::format("{}: add_norm {}: the shape says {}", op,
                                      given ? "given" : "missing", expected ? "one" : "none"));
  }
  if (!given) return;
  if (!(given->eps >= 0) || std::isinf(given->eps)) {
    throw InvalidArgument(
        fmt::format("{}: eps {}: expected a finite number of at least 0", op, given->eps));
  }
  const auto apart = [&](const char* name, const Tensor& one, const char* of, const Tensor& other) {
    if (!overlap(one, other)) return;
    throw InvalidArgument(fmt::format("{}: {} {} shares memory with {}: expected its own", op, name,
                                      one.describe(), of));
  };
  apart("out", out, "hidden", given->hidden);
  apart("out", out, "residual", given->residual);
  apart("gain", given->gain, "out", out);
  apart("gain", given->gain, "hidden", given->hidden);
  if (given->hidden.data() != given->residual.data()) {
    apart("hidden", given->hidden, "residual", given->residual);
  } else if (given->hidden.dims() > 0 && given->residual.dims() > 0 &&
             given->hidden.stride(0) != given->residual.stride(0)) {
    throw InvalidArgument(
        fmt::format("{}: hidden {} shares memory with residual {}: expected the "
                    "same rows",
                    op, given->hidden.describe(), given->residual.describe()));
  }
}

}  // namespace tandem
