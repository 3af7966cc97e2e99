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

}  // namespace

void gemm(const Exec& exec, const QuantizedRows& a, const QuantizedRows& b, const Tensor& out,
          bool accumulate) {
  if (exec.on_gpu()) return gpu::gemm(exec.stream, a, b, out, accumulate);
  gemm(Values(a).tensor, Values(b).tensor.transposed(), out, {.accumulate = accumulate});
}

DType quantized_operand_dtype(const Exec& exec) {
  return exec.on_gpu() ? DType::e4m3 : DType::f32;
}

}  // namespace tandem
