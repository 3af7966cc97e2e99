// CPU and GPU implementations of quantize_rows (tandem/quantize.h), which checks the operands.
#pragma once

#include "core/exec.h"
#include "tandem/quantize.h"

namespace tandem {

/// Matrix [rows, columns]: codes x scales by row.
struct QuantizedRows {
  Tensor codes;   ///< e4m3 [rows, columns]
  Tensor scales;  ///< f32 [rows]
};

/// quantize_rows of operands that fit, on exec's device; on a GPU it is enqueued, as below.
void quantize_rows(const Exec& exec, const Tensor& x, const Tensor& codes, const Tensor& scales);
/// quantize_rows of the transpose of x [rows, columns]: codes [columns, rows], scales [columns]. On
/// a GPU x is bf16 and both extents are multiples of 16.
void quantize_columns(const Exec& exec, const Tensor& x, const Tensor& codes, const Tensor& scales);
/// x = codes x scales by row, f32 [rows, columns], on the CPU.
void dequantize_rows(const Tensor& codes, const Tensor& scales, const Tensor& x);

/// The rows of x may have any strides.
void quantize_rows_on_cpu(const Tensor& x, const Tensor& codes, const Tensor& scales);
/// Codes of the values themselves, with scales of 1: the control that scales are measured against.
void round_rows_on_cpu(const Tensor& x, const Tensor& codes, const Tensor& scales);

/// Also checks the GPU-only requirements on operands.
void quantize_rows_on_gpu(Communicator& comm, const Tensor& x, const Tensor& codes,
                          const Tensor& scales);
void quantize_rows_on_gpu(const Exec& exec, const Tensor& x, const Tensor& codes,
                          const Tensor& scales);
void quantize_columns_on_gpu(const Exec& exec, const Tensor& x, const Tensor& codes,
                             const Tensor& scales);

}  // namespace tandem
