#include "gemm/coded_weight.h"

#include <fmt/format.h>

#include "gemm/cpu/coded_product.h"
#include "gemm/cuda/coded_gemm.h"
#include "tandem/error.h"

namespace tandem {
namespace {

constexpr WeightFormat kWeightFormats[] = {WeightFormat::int8, WeightFormat::e4m3};

CodedMatrix shape_on_gpu(WeightFormat format, int64_t rows, int64_t columns) {
  const gpu::CodedShape shape = gpu::coded_shape(rows, columns);
  return {format, rows, columns, Tensor(nullptr, DType::u8, {rows, shape.code_columns}),
          Tensor(nullptr, DType::f32, {shape.scale_rows, shape.scale_columns})};
}

CodedMatrix shape_on_cpu(WeightFormat format, int64_t rows, int64_t columns) {
  CodedMatrix matrix{format, rows, columns, {}, {}};
  const int64_t groups = matrix.groups();
  matrix.codes = Tensor(nullptr, DType::u8, {rows, groups * group_of(format)});
  matrix.scales = Tensor(nullptr, scale_dtype(format), {rows, groups});
  return matrix;
}

Tensor placed(const Tensor& shape, const Memory& memory) {
  return memory.view(shape.dtype(), {shape.dim(0), shape.dim(1)});
}

void check_weight(const CodedMatrix& matrix, const Tensor& weight, const char* what, bool fits) {
  if (fits && weight.dims() == 2 && weight.dim(0) == matrix.rows &&
      weight.dim(1) == matrix.columns && weight.contiguous()) {
    return;
  }
  throw InvalidArgument(fmt::format("{} weights: {} is {}: expected {} x {}, contiguous",
                                    name_of(matrix.format), what, weight.describe(), matrix.rows,
                                    matrix.columns));
}

void check_product(const CodedMatrix& weight, const Tensor& x, const Tensor& out,
                   const CodedOptions& options) {
  const std::string_view format = name_of(weight.format);
  if (x.dims() != 2 || x.dim(1) != weight.columns) {
    throw InvalidArgument(fmt::format("{} product: x is {}: expected {} columns", format,
                                      x.describe(), weight.columns));
  }
  const int64_t rows = weight.rows - options.first_row;
  if (out.dims() != 2 || out.dim(0) != x.dim(0) || options.first_row < 0 || out.dim(1) > rows) {
    throw InvalidArgument(
        fmt::format("{} product: out is {}: expected {} rows and at most {} columns", format,
                    out.describe(), x.dim(0), rows));
  }
}

void check_gpu_product(const CodedMatrix& weight, const Tensor& x, const Tensor& out,
                       int64_t columns) {
  if (out.dim(1) == columns && gpu::is_coded_gemm(weight, x, out)) return;
  throw InvalidArgument(fmt::format(
      "{} product: x {}, out {}: expected at most {} rows of bf16 at multiples of 16 bytes, and {} "
      "columns of bf16 or f32",
      name_of(weight.format), x.describe(), out.describe(), kMaxFewRows, columns));
}

}  // namespace

std::vector<std::string> weight_format_names() {
  std::vector<std::string> names{"none"};
  for (const WeightFormat format : kWeightFormats) names.emplace_back(name_of(format));
  return names;
}

std::optional<WeightFormat> parse_weight_format(std::string_view name) {
  if (name == "none") return std::nullopt;
  for (const WeightFormat format : kWeightFormats) {
    if (name == name_of(format)) return format;
  }
  throw InvalidArgument(fmt::format("weights '{}': expected none, int8 or e4m3", name));
}

CodedWeight::CodedWeight(const Exec& exec, WeightFormat format, int64_t rows, int64_t columns)
    : matrix_(exec.on_gpu() ? shape_on_gpu(format, rows, columns)
                            : shape_on_cpu(format, rows, columns)) {
  if (exec.on_gpu() && !gpu::has_coded_gemm()) {
    throw Unsupported(fmt::format(
        "weights in {}: needs a Hopper GPU (and TANDEM_GPU_PORTABLE unset), or CPU ranks",
        name_of(format)));
  }
  codes_ = Memory(matrix_.codes.bytes(), exec.device);
  scales_ = Memory(matrix_.scales.bytes(), exec.device);
  matrix_.codes = placed(matrix_.codes, codes_);
  matrix_.scales = placed(matrix_.scales, scales_);
}

void CodedWeight::quantize(const Exec& exec, const Tensor& weight) {
  check_weight(matrix_, weight, "the matrix", weight.dtype() == DType::f32);
  exec.on_gpu() ? gpu::quantize(exec.stream, weight, matrix_) : cpu::quantize(weight, matrix_);
}

void CodedWeight::multiply(const Exec& exec, const Tensor& x, const Tensor& out,
                           const CodedOptions& options) const {
  check_product(matrix_, x, out, options);
  if (!exec.on_gpu()) return cpu::multiply(matrix_, x, out, options);
  check_gpu_product(matrix_, x, out, options.first_row == 0 ? matrix_.rows : 0);
  if (x.dim(0) == 0) return;
  gpu::coded_gemm(exec.stream, matrix_, x, out, {.accumulate = options.accumulate});
}

bool CodedWeight::multiply_swiglu(const Exec& exec, const Tensor& x, const Tensor& out) const {
  check_product(matrix_, x, out, {});
  // The kernel loads scales of both halves, which TMA reads from multiples of 16 bytes on.
  if (!exec.on_gpu() || out.dtype() != DType::bf16 || x.dim(0) > kMaxFewRows ||
      matrix_.rows % 8 != 0) {
    return false;
  }
  check_gpu_product(matrix_, x, out, matrix_.rows / 2);
  if (x.dim(0) == 0) return true;
  gpu::coded_gemm(exec.stream, matrix_, x, out, {.swiglu = true});
  return true;
}

void CodedWeight::read(const Exec& exec, const Tensor& to) const {
  const bool rounds = exec.on_gpu() && to.dtype() == DType::bf16;
  check_weight(matrix_, to, "the destination", rounds || to.dtype() == DType::f32);
  exec.on_gpu() ? gpu::read(exec.stream, matrix_, to) : cpu::read(matrix_, to);
}

}  // namespace tandem
