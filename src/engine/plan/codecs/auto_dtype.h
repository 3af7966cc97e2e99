// train.dtype = "auto": f32 or bf16, by timing the model's GEMMs on this machine.
#pragma once

#include <string>

#include "engine/model/config.h"
#include "tandem/communicator.h"
#include "tandem/dtype.h"

namespace tandem {

struct DTypeChoice {
  DType dtype = DType::f32;
  double f32_ms = 0, bf16_ms = 0;  ///< GEMMs of one microbatch, on the slowest rank
  std::string describe() const;    ///< one line for the log
};

/// bf16 only if it saves at least a fifth: below that its conversions can cost more than its GEMMs
/// save, and a noise-dependent choice would make runs on one machine differ.
DType faster_dtype(double f32_ms, double bf16_ms);

/// Measures for about a second, with all ranks computing concurrently, as in training with `tp`
/// tensor-parallel ranks and microbatches of `tokens`; the same result on every rank. Collective.
DTypeChoice choose_dtype(Communicator& world, const ModelConfig& model, int64_t tp, int64_t tokens);

}  // namespace tandem
