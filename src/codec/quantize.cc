#include "codec/quantize.h"

#include <fmt/format.h>

#include "core/operands.h"
#include "tandem/error.h"

namespace tandem {
namespace {

[[noreturn]] void reject(std::string_view operand, const Tensor& tensor,
                         const std::string& expected) {
  throw InvalidArgument(
      fmt::format("quantize_rows: {} is {}: expected {}", operand, tensor.describe(), expected));
}

}  // namespace

std::string_view name_of(Scaling scaling) {
  switch (scaling) {
    case Scaling::tensor:
      return "tensor";
    case Scaling::row:
      return "row";
  }
  return "?";
}

void quantize_rows(Communicator& comm, const Tensor& x, const Tensor& codes, const Tensor& scales) {
  const bool floats =
      x.dtype() == DType::f32 || x.dtype() == DType::bf16 || x.dtype() == DType::f16;
  if (x.dims() != 2 || !floats || !x.contiguous()) {
    reject("x", x, "contiguous rows of f32, bf16 or f16");
  }
  const int64_t rows = x.dim(0), columns = x.dim(1);
  if (codes.dims() != 2 || codes.dtype() != DType::e4m3 || codes.dim(0) != rows ||
      codes.dim(1) != columns || !codes.contiguous()) {
    reject("codes", codes, fmt::format("e4m3[{}, {}], contiguous", rows, columns));
  }
  if (scales.dims() != 1 || scales.dtype() != DType::f32 || scales.dim(0) != rows ||
      !scales.contiguous()) {
    reject("scales", scales, fmt::format("f32[{}], contiguous", rows));
  }
  require_apart("quantize_rows", {{"codes", &codes}, {"scales", &scales}}, {{"x", &x}});
  if (comm.on_gpu()) return quantize_rows_on_gpu(comm, x, codes, scales);
  for (const auto& [name, tensor] : {std::pair("x", &x), {"codes", &codes}, {"scales", &scales}}) {
    if (tensor->device().kind != DeviceKind::cpu) reject(name, *tensor, "a CPU tensor");
    if (!tensor->data() && tensor->elements()) reject(name, *tensor, "memory behind it");
  }
  quantize_rows_on_cpu(x, codes, scales);
}

void quantize_rows(const Exec& exec, const Tensor& x, const Tensor& codes, const Tensor& scales) {
  if (exec.on_gpu()) return quantize_rows_on_gpu(exec, x, codes, scales);
  quantize_rows_on_cpu(x, codes, scales);
}

void quantize_columns(const Exec& exec, const Tensor& x, const Tensor& codes,
                      const Tensor& scales) {
  if (exec.on_gpu()) return quantize_columns_on_gpu(exec, x, codes, scales);
  quantize_rows_on_cpu(x.transposed(), codes, scales);
}

}  // namespace tandem
