#include "overlap/contract/check.h"

#include <fmt/format.h>

#include <cmath>
#include <utility>

#include "core/operands.h"

namespace tandem {
namespace {

[[noreturn]] void reject(std::string_view op, std::string_view operand, const Tensor& tensor,
                         const std::string& expected) {
  throw InvalidArgument(fmt::format(
      "{}: {} is {}: expected {}", op, operand,
      tensor.contiguous() ? tensor.describe() : describe_with_strides(tensor), expected));
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

// Rows of `length` elements are dense and do not overlap.
bool has_strided_rows(const Tensor& t, int row, int along, int64_t length) {
  return (t.dim(along) <= 1 || t.stride(along) == 1) &&
         (t.dim(row) <= 1 || t.stride(row) >= length);
}

}  // namespace

void check_extents(std::string_view op, int64_t m, int64_t n, int64_t k) {
  if (m < 0 || n < 0 || k < 0) {
    throw InvalidArgument(
        fmt::format("{}: shape m {}, n {}, k {}: expected none below 0", op, m, n, k));
  }
  constexpr int64_t kMax = int64_t(1) << 48;
  int64_t elements = 0;
  for (const auto& [rows, columns] : {std::pair(m, k), std::pair(n, k), std::pair(m, n)}) {
    if (__builtin_mul_overflow(rows, columns, &elements) || elements > kMax) {
      throw InvalidArgument(fmt::format("{}: shape m {}, n {}, k {}: expected at most {} elements",
                                        op, m, n, k, kMax));
    }
  }
}

void check_shape(const OpDesc& desc) {
  check_extents(desc.op, desc.m, desc.n, desc.k);
  const auto is_summed = [](DType dtype) { return dtype == DType::f32 || dtype == DType::bf16; };
  if (!desc.scaled() || desc.gradient) {
    if (is_summed(desc.dtype)) return;
    throw InvalidArgument(fmt::format("{}: dtype {}: expected f32{}", desc.op, name_of(desc.dtype),
                                      desc.gradient ? " or bf16" : ", bf16 or e4m3"));
  }
  if (!is_summed(desc.out_dtype)) {
    throw InvalidArgument(
        fmt::format("{}: e4m3 to {}: expected an out_dtype of f32 or bf16 on CPU "
                    "ranks",
                    desc.op, name_of(desc.out_dtype)));
  }
  if (desc.weight_kn) {
    throw InvalidArgument(fmt::format("{}: e4m3 weight [K, N]: expected [N, K]", desc.op));
  }
}

void check_gpu_extents(std::string_view op, int64_t m, int64_t n, int64_t k) {
  constexpr int64_t kMax = int64_t(1) << 30;  // padded to whole tiles they are ints, too
  if (m <= kMax && n <= kMax && k <= kMax) return;
  throw InvalidArgument(
      fmt::format("{}: M {} N {} K {}: expected at most {} each on GPUs", op, m, n, k, kMax));
}

void check_rows(std::string_view op, std::string_view operand, const Tensor& tensor, int64_t rows,
                int64_t columns, DType dtype, DType other) {
  check_extent(op, operand, tensor, rows, columns, dtype, other);
  if (tensor.elements() == 0 || has_strided_rows(tensor, 0, 1, columns)) return;
  reject(op, operand, tensor, "dense rows (stride 1 in the last dimension)");
}

void check_matrix(std::string_view op, std::string_view operand, const Tensor& tensor, int64_t rows,
                  int64_t columns, DType dtype) {
  check_extent(op, operand, tensor, rows, columns, dtype, dtype);
  if (tensor.elements() == 0 || has_strided_rows(tensor, 0, 1, columns) ||
      has_strided_rows(tensor, 1, 0, rows)) {
    return;
  }
  reject(op, operand, tensor, "dense rows or columns (one stride of 1)");
}

void check_vector(std::string_view op, std::string_view operand, const Tensor& tensor,
                  int64_t columns, DType dtype) {
  if (tensor.dims() != 1 || tensor.dim(0) != columns || tensor.dtype() != dtype ||
      !tensor.contiguous() || tensor.device().kind != DeviceKind::cpu ||
      (!tensor.data() && columns > 0)) {
    reject(op, operand, tensor, fmt::format("{}[{}], contiguous", name_of(dtype), columns));
  }
}

void check_add_norm(std::string_view op, bool expected, const AddNorm* given) {
  if (expected != (given != nullptr)) {
    throw InvalidArgument(fmt::format("{}: add_norm {}: the shape says {}", op,
                                      given ? "given" : "missing", expected ? "one" : "none"));
  }
  if (given && (!(given->eps >= 0) || std::isinf(given->eps))) {
    throw InvalidArgument(
        fmt::format("{}: eps {}: expected a finite number of at least 0", op, given->eps));
  }
}

void check_scales(const OpDesc& desc, const Scales* given) {
  if (desc.scaled() != (given != nullptr)) {
    throw InvalidArgument(fmt::format("{}: scales {}: expected {} with dtype {}", desc.op,
                                      given ? "given" : "missing", desc.scaled() ? "them" : "none",
                                      name_of(desc.dtype)));
  }
  if (!given) return;
  const bool by_row = desc.scaled_by_row();
  check_vector(desc.op, "scales.x", given->x, by_row ? desc.x.rows : 1, DType::f32);
  check_vector(desc.op, "scales.weight", given->weight, by_row ? desc.n : 1, DType::f32);
}

void check_bias(std::string_view op, bool expected, const Tensor* given) {
  if (expected == (given != nullptr)) return;
  throw InvalidArgument(fmt::format("{}: bias {}: the shape says {}", op,
                                    given ? "given" : "missing", expected ? "one" : "none"));
}

void check_layout(std::string_view op, std::string_view operand, const Tensor& tensor,
                  bool weight_kn) {
  if (tensor.dims() != 2 || tensor.dim(0) <= 1 || tensor.dim(1) <= 1) return;
  const bool by_rows = tensor.stride(1) == 1, by_columns = tensor.stride(0) == 1;
  if (by_rows == by_columns || by_columns == weight_kn) return;
  throw InvalidArgument(fmt::format("{}: {} is {}: the shape has weight_kn {}: expected dense {}",
                                    op, operand, describe_with_strides(tensor), weight_kn,
                                    weight_kn ? "columns, as w.transposed() of [K, N]" : "rows"));
}

}  // namespace tandem
