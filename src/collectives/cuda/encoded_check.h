// Checks of a collective over a wire format before anything is sent.
#pragma once

#include <initializer_list>

#include "comm/device/gpu_communicator.h"
#include "core/operands.h"
#include "tandem/codec.h"

namespace tandem::gpu {

/// Support of a collective for `lossless`.
enum class Lossless { refused, sent };

/// Throws InvalidArgument or Unsupported unless the collective supports `wire` for the data's
/// dtype, `tensors` are contiguous on this rank's GPU, `residual`, if given, is error feedback of
/// `data`, and all ranks reach each other's memory; also rethrows an earlier failure.
void check_encoded(const GpuCommunicator& comm, const char* op, const Wire& wire,
                   std::initializer_list<Operand> tensors, const Tensor& data,
                   const Tensor* residual, Lossless lossless = Lossless::refused);

}  // namespace tandem::gpu
