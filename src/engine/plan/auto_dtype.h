// train.dtype = "auto": f32 or bf16, by timing the model's matrix products on this machine.
#pragma once

#include <string>

#include "engine/config/config.h"
#include "tandem/communicator.h"
#include "tandem/dtype.h"

namespace tandem {

struct DTypeChoice {
  DType dtype = DType::f32;
  double f32_ms = 0, bf16_ms = 0;  ///< the products of one microbatch, on the slowest rank
  std::string describe() const;    ///< one line for the log
};

/// bf16 only where it saves a fifth: below that its conversions can cost what its products save,
/// and a choice that noise could turn would make runs of one machine differ.
DType faster_dtype(double f32_ms, double bf16_ms);

/// Collective, about a second; the same on every rank. All ranks compute at once, as they will
/// in training.
DTypeChoice choose_dtype(Communicator& world, const TrainConfig& config);

}  // namespace tandem
