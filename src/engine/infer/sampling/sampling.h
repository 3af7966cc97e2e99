// Sampling of the next token: a pure function of the logits, the options and the step, so every
// rank chooses the same.
#pragma once

#include <cstdint>

#include "kernels/sample.h"

namespace tandem {

struct SamplingOptions {
  double temperature = 1;  ///< 0: always the most likely
  int64_t top_k = 0;       ///< number of most likely tokens to sample from; 0: all
  double top_p = 1;        ///< restricts these to the most likely ones with this total probability
  uint64_t seed = 0;
};

/// Options of the kernels for step `index`.
SampleOptions sample_options(const SamplingOptions& options, uint64_t index);

/// Throws InvalidArgument naming the option that is out of range.
void check(const SamplingOptions& options);

/// Token at step `index` by logits f32 [vocab] on the host; temperature is applied first, then
/// top-k, then top-p. Throws InvalidArgument for a non-finite logit.
int32_t sample(const Tensor& logits, const SamplingOptions& options, uint64_t index);

}  // namespace tandem
