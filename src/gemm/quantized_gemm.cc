#include "gemm/quantized_gemm.h"

#include "gemm/cuda/device_gemm.h"
#include "gemm/gemm.h"

namespace tandem {
namespace {

/// Values of codes on the CPU.
struct Values {
  explicit Values(const QuantizedRows& rows)
      : memory(size_t(rows.codes.elements()) * sizeof(float)),
        tensor(memory.view(DType::f32, {rows.codes.dim(0), rows.codes.dim(1)})) {
    dequantize_rows(rows.codes, rows.scales, tensor);
  }
  Memory memory;
  Tensor tensor;
};

/// to = from or, with `accumulate`, to + from, rounded.
void round_to(const Tensor& from, const Tensor& to, bool accumulate) {
  auto* const out = to.as<BFloat16>();
  for (int64_t i = 0; i < from.elements(); ++i) {
    const float before = accumulate ? out[i].to_float() : 0.0f;
    out[i] = BFloat16::from_float(before + from.as<float>()[i]);
  }
}

}  // namespace

void gemm(const Exec& exec, const QuantizedRows& a, const QuantizedRows& b, const Tensor& out,
          bool accumulate) {
  if (exec.on_gpu()) return gpu::gemm(exec.stream, a, b, out, accumulate);
  const Values rows(a), columns(b);
  if (out.dtype() == DType::f32) {
    return gemm(rows.tensor, columns.tensor.transposed(), out, {.accumulate = accumulate});
  }
  const Memory memory(size_t(out.elements()) * sizeof(float));
  const Tensor product = memory.view(DType::f32, {out.dim(0), out.dim(1)});
  gemm(rows.tensor, columns.tensor.transposed(), product);
  round_to(product, out, accumulate);
}

DType quantized_operand_dtype(const Exec& exec) {
  return exec.on_gpu() ? DType::e4m3 : DType::f32;
}

}  // namespace tandem
