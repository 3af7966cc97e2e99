// Choosing the next token. A pure function of the logits, the options and the step, so every rank
// chooses the same.
#pragma once

#include <cstdint>
#include <span>

namespace tandem {

struct SamplingOptions {
  double temperature = 1;  ///< 0: always the likeliest
  int64_t top_k = 0;       ///< only so many of the likeliest tokens; 0: all
  double top_p = 1;        ///< of those, only the likeliest that make up this share
  uint64_t seed = 0;
};

/// Throws InvalidArgument naming the option that is out of range.
void check(const SamplingOptions& options);

/// The token at step `index`, with temperature applied before top-k, and that before top-p. Throws
/// InvalidArgument for a logit that is no finite number.
int32_t sample(std::span<const float> logits, const SamplingOptions& options, uint64_t index);

}  // namespace tandem
