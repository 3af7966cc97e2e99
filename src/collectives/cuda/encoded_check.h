// What is checked of a collective over a wire format before anything is sent.
#pragma once

#include <initializer_list>

#include "comm/device/gpu_communicator.h"
#include "core/operands.h"
#include "tandem/codec.h"

namespace tandem::gpu {

/// Whether the collective has `lossless`, too.
enum class Lossless { refused, sent };

/// Throws InvalidArgument or Unsupported unless it has `wire` for the data's dtype, `tensors` are
/// contiguous on this rank's GPU, `residual`, where there is one, is error feedback of `data`, and
/// all ranks reach each other's memory; and what an earlier failure says.
void check_encoded(const GpuCommunicator& comm, const char* op, const Wire& wire,
                   std::initializer_list<Operand> tensors, const Tensor& data,
                   const Tensor* residual, Lossless lossless = Lossless::refused);

}  // namespace tandem::gpu
