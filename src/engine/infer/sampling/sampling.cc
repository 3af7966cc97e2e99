#include "engine/infer/sampling/sampling.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "core/host_copy.h"
#include "engine/infer/sampling/invalid_field.h"
#include "tandem/random.h"

namespace tandem {

void check(const SamplingOptions& options) {
  if (!(options.temperature >= 0) || std::isinf(options.temperature)) {
    throw InvalidField("temperature", options.temperature, "0 or more");
  }
  if (options.top_k < 0) {
    throw InvalidField("top_k", options.top_k, "0 (all) or more");
  }
  if (!(options.top_p > 0 && options.top_p <= 1)) {
    throw InvalidField("top_p", options.top_p, "above 0 and at most 1");
  }
}

SampleOptions sample_options(const SamplingOptions& options, uint64_t index) {
  return {.temperature = options.temperature,
          .top_p = options.top_p,
          .top_k = options.top_k,
          .uniform = double(uniform(options.seed, stream_of("sample"), index))};
}

int32_t sample(const Tensor& row, const SamplingOptions& options, uint64_t index) {
  const std::span logits = host_values(row);
  const Sampled sampled = sample_row(logits, sample_options(options, index));
  if (sampled.token >= 0) return sampled.token;
  const auto bad = std::ranges::find_if_not(logits, [](float x) { return std::isfinite(x); });
  throw InvalidArgument(fmt::format(
      "logit of token {} is {}: expected finite numbers (the model's values leave the range of "
      "its dtype)",
      bad - logits.begin(), *bad));
}

}  // namespace tandem
