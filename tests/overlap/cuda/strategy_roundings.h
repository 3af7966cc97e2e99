// Rounding implied by a public operator's strategy.
#pragma once

#include "overlap/contract/cuda/algorithms.h"
#include "tandem/overlap.h"

namespace tandem::test {

/// Algorithm with the most roundings that `strategy` may select.
constexpr gpu::Algorithm algorithm_of(Strategy strategy) {
  return strategy == Strategy::overlapped ? gpu::Algorithm::chunked : gpu::Algorithm::serial_nccl;
}

}  // namespace tandem::test
