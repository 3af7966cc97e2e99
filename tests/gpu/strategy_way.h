// Rounding implied by a public operator's strategy.
#pragma once

#include "overlap/contract/cuda/ways.h"
#include "tandem/overlap.h"

namespace tandem::test {

/// Algorithm with the most roundings that `strategy` may select.
constexpr gpu::Way way_of(Strategy strategy) {
  return strategy == Strategy::overlapped ? gpu::Way::chunked : gpu::Way::serial_nccl;
}

}  // namespace tandem::test
