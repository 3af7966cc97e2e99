// e4m3 tensors and their scales: value = code x scale, one f32 scale per tensor or per row.
// Operators take both (tandem/overlap.h).
#pragma once

#include "tandem/communicator.h"
#include "tandem/export.h"
#include "tandem/tensor.h"

TANDEM_API_BEGIN
namespace tandem {

/// Extent of one scale: the whole tensor, or one row (a token of x, an output feature of the
/// weight).
enum class Scaling : uint8_t { tensor, row };
std::string_view name_of(Scaling scaling);

/// Scales of a GEMM's operands, both of one Scaling: f32, [1] or [rows], contiguous, on the
/// operand's device.
struct Scales {
  Tensor x, weight;
};

/// codes = x / scales by row. A row's scale is absmax / 448, and at least 2^-126, so that a row of
/// zeros has codes of 0. Rounds to nearest even. An infinity or NaN becomes NaN; with an infinity
/// the rest of its row becomes 0. x: f32, bf16 or f16 [rows, columns]; codes: e4m3 of the same
/// shape; scales: f32 [rows]; all contiguous; codes and scales overlap no other operand. Runs on
/// the CPU or, with a communicator of run_gpus, on its GPU (16-byte aligned, columns a multiple of
/// 16; enqueued on the communicator's stream), with the same bits. Not collective. Throws
/// InvalidArgument.
void quantize_rows(Communicator& comm, const Tensor& x, const Tensor& codes, const Tensor& scales);

}  // namespace tandem
TANDEM_API_END
