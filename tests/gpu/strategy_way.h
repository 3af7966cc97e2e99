// What a public operator's strategy says of its roundings.
#pragma once

#include "overlap/contract/cuda/ways.h"
#include "tandem/overlap.h"

namespace tandem::test {

/// The way with the most roundings that `strategy` may take.
constexpr gpu::Way way_of(Strategy strategy) {
  return strategy == Strategy::overlapped ? gpu::Way::chunked : gpu::Way::serial_nccl;
}

}  // namespace tandem::test
