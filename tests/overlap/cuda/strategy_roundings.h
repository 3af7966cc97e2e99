// Rounding implied by a public operator's strategy.
#pragma once

#include "overlap/contract/cuda/roundings.h"
#include "tandem/overlap.h"

namespace tandem::test {

/// Candidate with the most roundings that `strategy` may select.
constexpr std::string_view candidate_of(Strategy strategy) {
  return strategy == Strategy::overlapped ? "chunked" : gpu::kNccl;
}

}  // namespace tandem::test
